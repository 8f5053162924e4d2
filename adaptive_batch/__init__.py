"""adaptive_batch: the batch size of a fine-tuning run, known instead of guessed.

With torchtune, the recipes `adaptive_full_finetune` and `adaptive_probe` are all one needs. Without it, in any loop:

    adaptive_batch.loop.AdaptiveLoop            all of it put together: bound, steps that grow, micro-batches, learning rate

or its parts:

    adaptive_batch.probe.find_max_batch_size    the largest batch that fits, from trials and a search
    adaptive_batch.trial.Rehearsal              trials of a training step that leave no trace
    adaptive_batch.search                       Predictive, BinarySearch, Halving: which size to try next
    adaptive_batch.growth                       the next batch size, from a function of the user's, capped
    adaptive_batch.batching                     rows of a step into micro-batches; steps filled to a budget of tokens
    adaptive_batch.stream, .accumulation        rows in, step batches out, run as micro-batches, replayed after an OOM
    adaptive_batch.evaluation                   the loss of many rows, with a capacity of its own
    adaptive_batch.learning_rate, .progress     the rate at a point of training; how far training has come
    adaptive_batch.memory                       is_out_of_memory; what a device has and what ran

Every room needs torch and the standard library alone; docs/architecture.md draws the house.
"""

__version__ = "0.1.0"
