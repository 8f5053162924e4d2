"""The idea of adaptive_batch in one file, which imports PyTorch alone.

    python examples/one_file.py

It takes six seconds on a CPU. Read it from top to bottom. Five parts replace the guess at a batch
size:

1. search    finds the largest batch whose whole training step fits in memory
2. split     divides a batch into micro-batches, and keeps the gradients of the batch
3. retry     repeats a step that ran out of memory, on the same rows, in smaller micro-batches
4. growth    enlarges the batch by a rule, up to the size that the search found
5. rate      scales the learning rate with the batch

The package does the same for any model, loss, data format, optimizer and number of devices.
tests/project/test_one_file.py trains with both, and compares losses and weights bit for bit.
"""

import gc
import inspect
import io
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH_SIZE, EPOCHS, LEARNING_RATE = 8, 4, 3e-3  # the learning rate was chosen for this batch size
GOOD_STEPS = 5  # steps without an OOM before a lowered limit is raised again
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# --- The task: predict the next byte of PyTorch's documentation. ---

DOCSTRINGS = {inspect.getdoc(value) or "" for value in vars(nn).values()}
ROWS = [list(text.encode()[:64]) for text in sorted(DOCSTRINGS) if len(text) > 1]


class Model(nn.Module):
    """A causal transformer with one layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=DEVICE)
        return self.head(self.layer(self.embed(tokens), src_mask=mask, is_causal=True))


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest of them."""
    tokens = [torch.tensor(row) for row in rows]
    return {
        "tokens": nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-100),
    }


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over the labels of a batch."""
    logits, labels = model(batch["tokens"].to(DEVICE)), batch["labels"].to(DEVICE)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def count_labels(batch: dict[str, torch.Tensor]) -> int:
    """Count the labels that the mean loss of a batch is over."""
    return int((batch["labels"][:, 1:] != -100).sum())


# --- 1. Search: the largest batch whose whole training step fits in memory. ---


class LimitedMemory(TorchDispatchMode):
    """Limits memory: counts the bytes of live tensors, and raises the error of a full GPU.

    Leave it out to use all the memory of a GPU, whose allocator raises this error by itself.
    """

    def __init__(self, limit_bytes: int, model: nn.Module) -> None:
        super().__init__()
        self.limit_bytes, self.live_bytes = limit_bytes, 0
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.count(*model.parameters())

    def count(self, *tensors: torch.Tensor) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage not in self.storages:
                self.storages.add(storage)
                self.free(-storage.nbytes())
                weakref.finalize(storage, self.free, storage.nbytes())

    def free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        if self.live_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"{self.live_bytes} bytes are over the limit")
        return result


def clear(model: nn.Module) -> None:
    """Drop the gradients, and free the memory of a failed attempt."""
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()


def fits(model: nn.Module, optimizer: torch.optim.Optimizer, rows: list[list[int]]) -> bool:
    """Return whether a whole training step fits, with `rows` as its second micro-batch.

    The first micro-batch, of one row, leaves gradients, which then occupy memory.
    """
    try:
        for micro_batch in (rows[:1], rows):
            mean_loss(model, collate(micro_batch)).backward()
        optimizer.step()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        clear(model)


@contextmanager
def without_a_trace(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore weights, the optimizer's state and random numbers afterwards, bit for bit."""
    saved = io.BytesIO()  # on the host, so that trials have the same device memory as training
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    with torch.random.fork_rng():
        yield
    saved.seek(0)
    weights, state = torch.load(saved, map_location="cpu")
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


def find_max_rows(model: nn.Module, optimizer: torch.optim.Optimizer, longest: list[int]) -> int:
    """Return the largest batch of the longest rows that fits: double, then bisect."""
    with without_a_trace(model, optimizer):
        # The first step allocates the optimizer state, the second runs with it in memory.
        if not (fits(model, optimizer, [longest]) and fits(model, optimizer, [longest])):
            raise torch.OutOfMemoryError("one row does not fit")
        fitting, too_many = 1, len(ROWS) + 1
        while too_many - fitting > 1:
            candidate = min(2 * fitting, (fitting + too_many) // 2)
            if fits(model, optimizer, [longest] * candidate):
                fitting = candidate
            else:
                too_many = candidate
    return fitting  # a size that was tried


# --- 2. Split: the gradients of the whole batch, for any micro-batch size. ---


def split(rows: list, max_rows: int) -> list[list]:
    """Split rows into the fewest micro-batches of at most `max_rows`, of nearly equal size."""
    number = math.ceil(len(rows) / max_rows)
    return [
        rows[math.ceil(i * len(rows) / number) : math.ceil((i + 1) * len(rows) / number)]
        for i in range(number)
    ]


# --- 3. Retry: the same rows in smaller micro-batches. ---


class Step:
    """Runs forward and backward of a batch, and repeats them in smaller micro-batches after an OOM.

    `max_rows` is the limit of a micro-batch now, and `full` the limit before an OOM lowered it.
    """

    def __init__(self, model: nn.Module, max_rows: int) -> None:
        self.model = model
        self.full = self.max_rows = max_rows
        self.good_steps = self.wait = GOOD_STEPS

    def __call__(self, rows: list[list[int]]) -> float:
        """Add the gradients of the mean loss of `rows`, and return that loss."""
        if self.max_rows < self.full and self.good_steps >= self.wait:
            self.max_rows, self.good_steps = self.full, 0
        random_state, cuda_states = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        while (loss := self.attempt(split(rows, self.max_rows))) is None:
            # Undo the attempt. After the except block, the tensors of the exception are freed.
            clear(self.model)
            torch.set_rng_state(random_state)
            torch.cuda.set_rng_state_all(cuda_states)
        self.good_steps += 1
        return loss

    def attempt(self, micro_batches: list[list[list[int]]]) -> float | None:
        """Run the micro-batches of a step; after an OOM lower the limit and return None."""
        batches = [collate(micro_batch) for micro_batch in micro_batches]
        labels = [count_labels(batch) for batch in batches]
        losses = []
        for batch, num_labels in zip(batches, labels, strict=True):
            try:
                # The mean over the batch is the sum of the means of the micro-batches, weighted by
                # their fractions of the labels. Gradients add up in the same way.
                loss = mean_loss(self.model, batch) * (num_labels / sum(labels))
                loss.backward()
                losses.append(loss.detach())
            except torch.OutOfMemoryError:
                if len(batch["tokens"]) == 1:
                    raise
                # Wait twice as long if the full limit failed soon after it was tried again.
                if self.max_rows == self.full:
                    self.wait = 2 * self.wait if self.good_steps < self.wait else GOOD_STEPS
                self.max_rows, self.good_steps = len(batch["tokens"]) // 2, 0
                return None
        return float(sum(losses))


# --- 4. Growth: a rule, up to the largest batch that fits. ---


def rows_to_add(epoch: int, batch_size: int) -> int:
    """Double the batch at the start of each epoch but the first."""
    return batch_size if epoch else 0


# --- 5. The training loop, with a learning rate that follows the batch. ---


def train(model: nn.Module) -> Iterator[list[tuple[int, float, float]]]:
    """Train a model; yield the rows, learning rate and loss of the steps of each epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    max_rows = find_max_rows(model, optimizer, max(ROWS, key=len))
    print(f"{max_rows} rows of {max(map(len, ROWS))} tokens fit")
    step = Step(model, max_rows)
    batch_size = BATCH_SIZE
    for epoch in range(EPOCHS):
        batch_size = max(batch_size, min(batch_size + rows_to_add(epoch, batch_size), max_rows))
        order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(epoch))
        steps = []
        for numbers in order.split(batch_size):
            loss = step([ROWS[number] for number in numbers])
            # The square root is for Adam; for SGD, use the ratio itself.
            rate = LEARNING_RATE * math.sqrt(len(numbers) / BATCH_SIZE)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            steps.append((len(numbers), rate, loss))
        print(
            f"epoch {epoch}: batches of {batch_size} rows, micro-batches of at most"
            f" {step.max_rows}, loss {loss:.3f}"
        )
        yield steps


def main() -> None:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    with LimitedMemory(32 * 2**20, model) as memory:
        for epoch, _ in enumerate(train(model)):
            if epoch == EPOCHS - 2:
                print("another process takes half of the memory")
                memory.limit_bytes //= 2


if __name__ == "__main__":
    main()
