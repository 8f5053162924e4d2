"""Mistakes are refused before weights load: the error names the key, the value and what
would do.
"""

import re

import pytest
from support.cli import MODEL, OURS

from adaptive_batch.errors import AdaptiveBatchError, DoesNotFitError, SettingError

FUNCTION = "batch_increase_function"
PROBE = "use_maximum_batch_size=True"
LENGTHS = "dataset.lengths=[10,20,30,40]"
OF_LENGTHS = ("dataset._component_=support.components.OfLengths", LENGTHS, "batch_size=2")
VALIDATED = (
    "dataset_val._component_=support.components.OfLengths",
    "dataset_val.lengths=[5]",
    "run_val_every_n_steps=1",
)
SCHEDULE = "batch_size_schedule"
STEPS = (
    f"{SCHEDULE}._component_=adaptive_batch.schedules.steps",
    f"{SCHEDULE}.batch_sizes=[4,8,16]",
    f"{SCHEDULE}.thresholds=[0.5ep,1ep]",
)
COSINE = (
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
ODD = ("dataset._component_=support.components.WithOddRow", "batch_size=2")
VOCABULARY = MODEL["vocab_size"]
PICTURES = "dataset._component_=support.components.with_pictures"

REFUSED = {
    # the growth function
    "a module that is not there": ([f"{FUNCTION}=nowhere.f"], "nowhere.f", "no module nowhere"),
    "a name that is not there": (
        [f"{FUNCTION}=support.components.four_mor"],
        FUNCTION,
        "near it: four_more",
    ),
    "no dotted path": ([f"{FUNCTION}=grow"], FUNCTION, "dotted path"),
    "not callable": ([f"{FUNCTION}=support.components.NOT_CALLABLE"], FUNCTION, "give a function"),
    "takes other arguments": (
        [f"{FUNCTION}=support.components.takes_one"],
        FUNCTION,
        "epoch, batch_size",
    ),
    "raises": (
        [f"{FUNCTION}=support.components.raises"],
        r"epoch=0, batch_size=4",
        "KeyError: 'no such stage'",
    ),
    "returns None": (
        [f"{FUNCTION}=support.components.returns_none"],
        r"epoch=0, batch_size=4",
        "whole number",
    ),
    "returns a float": (
        [f"{FUNCTION}=support.components.returns_float"],
        r"epoch=0, batch_size=4",
        "whole number",
    ),
    "returns a bool": (
        [f"{FUNCTION}=support.components.returns_bool"],
        r"epoch=0, batch_size=4",
        "whole number",
    ),
    "returns a negative number": (
        [f"{FUNCTION}=support.components.returns_negative"],
        r"epoch=0, batch_size=4",
        "0 to 1000000000",
    ),
    "returns a huge number": (
        [f"{FUNCTION}=support.components.returns_huge"],
        r"epoch=0, batch_size=4",
        "0 to 1000000000",
    ),
    "a builder in place of what it builds": (
        [f"{FUNCTION}=adaptive_batch.schedules.geometric"],
        f"{FUNCTION}='adaptive_batch.schedules.geometric'",
        f"give a block: {FUNCTION}={{_component_: adaptive_batch.schedules.geometric, factor: 2}}",
    ),
    "a builder in place of the schedule that it builds": (
        [f"{SCHEDULE}=adaptive_batch.schedules.by_noise_scale"],
        SCHEDULE,
        (
            f"give a block: {SCHEDULE}={{_component_: adaptive_batch.schedules.by_noise_scale,"
            " start: 16}"
        ),
    ),
    "raises in a later epoch": (
        [f"{FUNCTION}=support.components.raises_in_second_epoch", PROBE],
        r"epoch=1, batch_size=4",
        "KeyError: 'no such stage'",
    ),
    "returns a negative number in a later epoch": (
        [f"{FUNCTION}=support.components.negative_in_second_epoch"],
        r"epoch=1, batch_size=4",
        "0 to 1000000000",
    ),
    "ends the program": (
        [f"{FUNCTION}=support.components.exits"],
        r"epoch=0, batch_size=4",
        "raised SystemExit: 0",
    ),
    "ends the program in a later epoch": (
        [f"{FUNCTION}=support.components.exits_in_second_epoch"],
        r"epoch=1, batch_size=4",
        "raised SystemExit: 0",
    ),
    "a builder that ends the program": (
        [f"{FUNCTION}._component_=support.components.exits"],
        f"{FUNCTION}._component_='support.components.exits'",
        "and failed: 0",
    ),
    "a rule that ends the program": (
        [f"{SCHEDULE}=support.components.exits"],
        r"exits\(Progress\(",
        "raised SystemExit: 0",
    ),
    "a number": ([f"{FUNCTION}=3"], f"{FUNCTION}=3", "dotted path"),
    "a component called without its arguments": (
        [f"{FUNCTION}._component_=support.components.four_more"],
        FUNCTION,
        f"for a function itself write {FUNCTION}: support.components.four_more",
    ),
    "a ready function with a wrong factor": (
        [f"{FUNCTION}._component_=adaptive_batch.schedules.geometric", f"{FUNCTION}.factor=0"],
        "factor",
        "",
    ),
    "both ways to grow": (
        [f"{FUNCTION}=support.components.four_more", "batch_size_schedule=x.y"],
        "batch_size_schedule",
        "remove one",
    ),
    # whole numbers
    **{
        f"{key}={value}": ([f"{key}={value}"], f"{key}=", "whole number, 1 or more")
        for key in ("batch_size", "epochs", "gradient_accumulation_steps")
        for value in (0, -3, 2.5, "True")
    },
    "max_steps_per_epoch=0": (["max_steps_per_epoch=0"], "max_steps_per_epoch=0", "whole number"),
    # switches
    "a switch that is no switch": (
        ["use_maximum_batch_size=3"],
        "use_maximum_batch_size=3",
        "True or False",
    ),
    "drop_last that is no switch": (["drop_last=some"], "drop_last='some'", "True or False"),
    # the probe
    "an unknown search": (["probe.search=fast"], "probe.search='fast'", "predict, binary, halve"),
    "no size": (["probe.device_memory=12XiB"], "probe.device_memory='12XiB'", "12GiB"),
    "a negative size": (["probe.device_memory=-1"], "probe.device_memory=-1", "12GiB"),
    "more than the device has": (
        [PROBE, "probe.device_memory=900TiB"],
        "probe.device_memory='900TiB'",
        "the device has",
    ),
    "less than the weights need": (
        [PROBE, "probe.device_memory=100KiB"],
        "probe.device_memory='100KiB'",
        "weights alone need",
    ),
    "headroom of one": (["probe.headroom=1"], "probe.headroom=1", "below 1"),
    "negative headroom": (["probe.headroom=-0.1"], "probe.headroom=-0.1", "at least 0"),
    "headroom that is not a number": (["probe.headroom=nan"], "probe.headroom=", "share"),
    "maximum of zero": (["probe.maximum=0"], "probe.maximum=0", "1 or more"),
    "an unknown key in probe": (
        ["probe.serach=binary"],
        "probe.serach='binary'",
        "near it: search",
    ),
    "probe that is no block": (["probe=binary"], "probe='binary'", "block"),
    "a word for the length": (
        ["probe.sequence_length=shortest"],
        "probe.sequence_length='shortest'",
        "longest, max_seq_len",
    ),
    "a length above the model's": (
        [PROBE, "probe.sequence_length=65"],
        "probe.sequence_length=65",
        "64 tokens at most",
    ),
    "no lengths": (["probe.sequence_lengths=[]"], "probe.sequence_lengths=", "list of lengths"),
    "no length at which the tokenizer cuts": (
        [PROBE, *OF_LENGTHS, "probe.sequence_length=max_seq_len", "tokenizer.max_seq_len=null"],
        "probe.sequence_length='max_seq_len'",
        "",
    ),
    "a probe of more tokens than the model takes": (
        [PROBE, *OF_LENGTHS, "probe.sequence_length=max_seq_len", "tokenizer.max_seq_len=100"],
        "probe.sequence_length='max_seq_len'",
        "rows have up to 100 tokens, and the model takes 64 at most; set tokenizer.max_seq_len=64",
    ),
    "a batch above the rows of an epoch": (
        [f"{FUNCTION}=support.components.four_more", "batch_size=64"],
        "batch_size=64",
        (
            "32 rows are tried at most, as probe.maximum and the rows of an epoch allow; give 32 or"
            " less"
        ),
    ),
    "a batch above the probe's maximum": (
        [f"{FUNCTION}=support.components.four_more", "batch_size=16", "probe.maximum=8"],
        "batch_size=16",
        "8 rows are tried at most, as probe.maximum and the rows of an epoch allow; give 8 or less",
    ),
    "a word for a switch": (
        ["optimizer_in_bwd=maybe"],
        "optimizer_in_bwd='maybe'",
        "True or False",
    ),
    # keys
    "a key that is nearly ours": (
        ["use_max_batch_size=True"],
        "use_max_batch_size=True",
        "use_maximum_batch_size",
    ),
    "a word for a switch of synchronization": (
        ["sync_gradients_every_micro_batch=sometimes"],
        "sync_gradients_every_micro_batch='sometimes'",
        "True or False",
    ),
    "two ways to recompute": (
        ["ac_mode=full", "enable_activation_checkpointing=True"],
        "ac_mode='full'",
        "enable_activation_checkpointing is True too",
    ),
    # what does not go together
    "optimizer in backward with accumulation": (
        ["optimizer_in_bwd=True", "gradient_accumulation_steps=2"],
        "gradient_accumulation_steps=2",
        "optimizer_in_bwd=False",
    ),
    "optimizer in backward with clipping": (
        ["optimizer_in_bwd=True", "clip_grad_norm=1.0"],
        "clip_grad_norm=1.0",
        "optimizer_in_bwd=False",
    ),
    "a collate function for inference": (
        ["collate_fn=torchtune.data.left_pad_sequence"],
        "collate_fn=",
        "padded_collate_sft",
    ),
    "a device that is not here": (
        ["device=cuda", "dtype=bf16"],
        "device='cuda'",
        "sees no CUDA device; run this where there is one, or give device=cpu dtype=fp32",
    ),
    **{
        f"the device {name}": ([f"device={name}"], f"device='{name}'", "; give cuda or cpu")
        for name in ("meta", "xpu", "hpu")
    },
    **{
        setting: ([setting], setting.partition("=")[0], "give a number that is finite")
        for setting in (
            "optimizer.lr=text",
            "optimizer.lr=.inf",
            "optimizer.weight_decay=.inf",
            "model.lora_alpha=text",
            "model.norm_eps=text",
        )
    },
    **{
        setting: ([setting], setting.partition("=")[0], "give a share of at least 0 and below 1")
        for setting in (
            "model.lora_dropout=.nan",
            "model.attn_dropout=1",
            "loss.label_smoothing=-0.1",
        )
    },
    "layers without end": (
        ["model.num_layers=1000000000000"],
        "model.num_layers=1000000000000",
        "give 10000 or less",
    ),
    "the seventh CPU": (["device=cpu:7"], "device='cpu:7'", "there is one CPU; give cpu"),
    "rows that collating fails on": (
        ["collate_fn=torchtune.data.padded_collate_dpo"],
        "collate_fn='torchtune.data.padded_collate_dpo'",
        "it fails on the dataset's rows (KeyError: 'chosen_input_ids')",
    ),
    "rows that are cut before their labels": (
        ["tokenizer.max_seq_len=2"],
        "dataset='json'",
        "and tokenizer.max_seq_len=2, to which rows are cut",
    ),
    "labels that another number marks": (
        ["loss.ignore_index=5"],
        "loss.ignore_index=5",
        "json marks what is not trained by -100; give that",
    ),
    "a name in place of a block": (
        ["lr_scheduler=mine.schedule"],
        "lr_scheduler='mine.schedule'",
        "it is a block; give lr_scheduler._component_=mine.schedule",
    ),
    "a block without a component": (
        ["lr_scheduler.num_cycles=2"],
        "lr_scheduler={'num_cycles': 2}",
        "give lr_scheduler._component_ too",
    ),
    "a file without weights": (
        ["checkpointer.checkpoint_files=[config.json]"],
        "checkpointer.checkpoint_files=['config.json']",
        "config.json holds no weights",
    ),
    "an optimizer that cannot step": (
        ["optimizer.differentiable=null"],
        "optimizer={",
        "its step fails (",
    ),
    "an optimizer that needs a closure": (
        ["optimizer._component_=torch.optim.LBFGS", "~optimizer.fused"],
        "optimizer={'_component_': 'torch.optim.LBFGS'",
        "its step fails (LBFGS.step() missing 1 required positional argument: 'closure')",
    ),
    **{
        f"a loss with {name}": (
            [f"loss=torch.nn.{loss}", *settings],
            f"loss={{'_component_': 'torch.nn.{loss}'",
            remedy,
        )
        for name, loss, settings, remedy in (
            (
                "a reduction that is none",
                "CrossEntropyLoss",
                ["loss.reduction=Mean"],
                "it cannot be computed (Mean is not a valid value for reduction)",
            ),
            ("no reduction", "CrossEntropyLoss", ["loss.reduction=none"], "not the one number"),
            ("other logits", "NLLLoss", [], "of logits that are all alike it is 0.0"),
        )
    },
    **{
        setting: ([setting], setting.partition("=")[0], "give a path")
        for setting in (
            "checkpointer.checkpoint_dir=null",
            "checkpointer.output_dir=5",
            "checkpointer.recipe_checkpoint=1",
            "checkpointer.adapter_checkpoint=5",
            "tokenizer.merges_file=0",
        )
    },
    "a file of weights that is no list": (
        ["checkpointer.checkpoint_files=model.safetensors"],
        "checkpointer.checkpoint_files='model.safetensors'",
        "give a list of names, such as [model.safetensors]",
    ),
    "a block over a block": (
        ["dataset={_component_: mine.rows}"],
        "dataset={'_component_': 'mine.rows'}",
        "it is a block in the file; give dataset._component_=mine.rows",
    ),
    "half precision without scaling": (["dtype=fp16"], "dtype='fp16'", "bf16 or fp32"),
    "offloading without CUDA": (
        ["enable_activation_offloading=True"],
        "enable_activation_offloading=True",
        "device=cuda",
    ),
    "a scheduler that torchtune's recipes cannot build": (
        ["lr_scheduler._component_=torch.optim.lr_scheduler.StepLR", "lr_scheduler.step_size=2"],
        "lr_scheduler='torch.optim.lr_scheduler.StepLR'",
        "num_training_steps",
    ),
    "an output folder that cannot be made": (
        ["output_dir=/proc/nowhere"],
        "output_dir='/proc/nowhere'",
        "cannot be made",
    ),
    # micro-batches
    "both ways to say what is run at once": (
        ["micro_batch_size=2", "micro_batch_tokens=auto"],
        "micro_batch_tokens='auto'",
        "micro_batch_size=2 is set too; both set what is run at once, so remove one",
    ),
    **{
        f"{key}={value}": ([f"{key}={value}"], f"{key}=", "give auto, or a whole number, 1 or more")
        for key in ("micro_batch_size", "micro_batch_tokens", "batch_size_val")
        for value in (0, -3, 2.5, "True", "most")
    },
    **{
        f"{key}={value}": ([f"{key}={value}"], f"{key}=", "give a whole number, 1 or more")
        for key in (
            "batch_tokens",
            "sample_window",
            "min_rows_per_batch",
            "max_rows_per_batch",
            "pad_to_multiple_of",
            "run_val_every_n_steps",
            "max_validation_batches",
        )
        for value in (0, -3, 2.5, "True", "auto")
    },
    **{
        f"{key}={value}": ([f"{key}={value}"], f"{key}=", f"give one of {options}")
        for key, options in {
            "sample_order": "dataloader, random, seqlen",
            "long_rows": "error, drop, alone",
            "uniform_micro_batches": "rows, lengths, both",
            "lr_scaling": "none, linear, sqrt",
            "on_out_of_memory": "shrink, raise",
        }.items()
        for value in ("best", 1, -0.5, "True", "[rows]")
    },
    **{
        f"reference_batch_size={value}": (
            ["lr_scaling=linear", f"reference_batch_size={value}"],
            "reference_batch_size=",
            "give a whole number of rows, 1 or more, or tokens as in 8192tok",
        )
        for value in (0, -3, 2.5, "True", "tok", "0tok", "-5tok", "many", "nantok")
    },
    "rows at once below the longest row": (
        [*OF_LENGTHS, "micro_batch_tokens=39"],
        "micro_batch_tokens=39",
        "a row is padded to 40 tokens; give 40 or more",
    ),
    "rows at once below the longest row as it is padded": (
        [*OF_LENGTHS, "micro_batch_tokens=40", "pad_to_multiple_of=16"],
        "micro_batch_tokens=40",
        "a row is padded to 48 tokens; give 48 or more",
    ),
    "equal micro-batches that no batch has": (
        ["uniform_micro_batches=rows", "micro_batch_size=3", "batch_size=7"],
        "uniform_micro_batches='rows'",
        "the 7 rows of a step divide into equal micro-batches of up to 3 only one by one",
    ),
    **{
        f"{setting} on rows that are more than text": (
            [PICTURES, "batch_size=2", setting],
            f"^{setting.partition('=')[0]}=",
            "rows have encoder_input, encoder_mask, ",
        )
        for setting in (
            "micro_batch_tokens=100",
            "micro_batch_tokens=auto",
            "batch_tokens=100",
            "uniform_micro_batches=lengths",
            "pad_to_multiple_of=8",
        )
    },
    # steps by tokens
    "fewer tokens than a row has": (
        [*OF_LENGTHS, "batch_tokens=35"],
        "batch_tokens=35",
        "row 3 alone has 40 tokens",
    ),
    "fewer tokens than the shortest rows have": (
        [*OF_LENGTHS, "batch_tokens=45", "min_rows_per_batch=3"],
        "min_rows_per_batch=3",
        "the 3 shortest rows have 60 tokens, and 45 are allowed",
    ),
    "a row alone, and three rows at least": (
        [*OF_LENGTHS, "batch_tokens=100", "min_rows_per_batch=3", "long_rows=alone"],
        "long_rows='alone'",
        "a row alone is fewer than min_rows_per_batch=3",
    ),
    "more rows at least than at most": (
        ["batch_tokens=200", "min_rows_per_batch=5", "max_rows_per_batch=4"],
        "min_rows_per_batch=5",
        "max_rows_per_batch is 4; give that or less",
    ),
    "tokens and the largest number of rows": (
        ["batch_tokens=200", PROBE],
        "batch_tokens=200",
        "remove one",
    ),
    "tokens and rows that grow": (
        ["batch_tokens=200", f"{FUNCTION}=support.components.four_more"],
        "batch_tokens=200",
        f"{FUNCTION} sets its rows; remove one",
    ),
    # with the optimizer in backward
    **{
        f"optimizer in backward with {setting}": (
            ["optimizer_in_bwd=True", setting],
            setting.partition("=")[0],
            "optimizer_in_bwd=False",
        )
        for setting in (
            "on_out_of_memory=shrink",
            "micro_batch_tokens=auto",
            "micro_batch_tokens=100",
            "batch_tokens=100",
            "uniform_micro_batches=rows",
            "micro_batch_size=2",
            "log_gradient_noise_scale=True",
            "grow_beyond_maximum=True",
        )
    },
    "optimizer in backward with a rule of the noise scale": (
        [
            "optimizer_in_bwd=True",
            f"{SCHEDULE}._component_=adaptive_batch.schedules.by_noise_scale",
            f"{SCHEDULE}.start=4",
        ],
        SCHEDULE,
        "there is no gradient left to measure",
    ),
    # validation
    "a validation set that is empty": (
        [*VALIDATED, "dataset_val._component_=support.components.empty_dataset"],
        "dataset_val=",
        "it has no rows; check its source, split and filter",
    ),
    "validation on nothing": (
        ["run_val_every_n_steps=5"],
        "run_val_every_n_steps=5",
        "there is nothing to validate on; set dataset_val",
    ),
    "validation rows longer than the model takes": (
        [*VALIDATED, "dataset_val.lengths=[9,65]", "batch_size_val=auto"],
        "dataset_val='support.components.OfLengths'",
        "row 1 has 65 tokens, and the model takes 64 at most; set tokenizer.max_seq_len=64 or less",
    ),
    # the learning rate
    "a scheduler that waits for a metric": (
        ["lr_scheduler._component_=support.schedulers.plateau"],
        "lr_scheduler='ReduceLROnPlateau'",
        "torchtune's cosine schedule, can follow",
    ),
    "a schedule that gives no rate after its warm-up": (
        [*COSINE, "lr_scheduler.num_cycles=1e308"],
        "lr_scheduler={",
        "it gives no rate (",
    ),
    **{
        f"a clock that is {name}": ([*COSINE, f"lr_clock={value}"], shown, remedy)
        for name, value, shown, remedy in (
            ("no unit", "epochs", "lr_clock='epochs'", "give one of samples, tokens, steps"),
            ("a number", 3, "lr_clock=3", "give one of samples, tokens, steps"),
            ("a list", "[steps]", "lr_clock=", "or a block such as {warmup: steps, decay: tokens}"),
            (
                "no unit for one of two",
                "{warmup: steps, decay: rows}",
                "lr_clock=",
                "give one of samples, tokens, steps",
            ),
            (
                "another block",
                "{warmup: steps, cooldown: steps}",
                "lr_clock=",
                "{warmup: steps, decay: tokens}",
            ),
        )
    },
    **{
        f"{clock} for a scheduler that counts, {scheduler}": (
            [f"lr_scheduler._component_={scheduler}", f"lr_clock={clock}"],
            "lr_clock=",
            (
                f"{scheduler} counts steps and can follow nothing else; give steps, or a LambdaLR"
                " such as"
            ),
        )
        for clock in ("samples", "tokens")
        for scheduler in ("support.schedulers.step_lr", "support.batch_rules.one_cycle")
    },
    "a warm-up of its own for a scheduler that counts": (
        [
            "lr_scheduler._component_=support.schedulers.step_lr",
            "lr_clock={warmup: steps, decay: tokens}",
        ],
        "lr_clock=",
        "a warm-up in another unit needs a scheduler with num_warmup_steps, such as",
    ),
    "a warm-up of its own without one": (
        [
            "lr_scheduler._component_=support.batch_rules.linear",
            "lr_clock={warmup: steps, decay: tokens}",
        ],
        "lr_clock=",
        "give one unit for both",
    ),
    # schedules
    **{
        f"thresholds {what}": (
            [*STEPS, f"{SCHEDULE}.thresholds={value}"],
            f"{SCHEDULE}.thresholds=",
            remedy,
        )
        for what, value, remedy in (
            ("that fall", "[2ep,1ep]", "they must rise, and 1ep comes after 2ep"),
            ("given twice", "[1ep,1.0ep]", "they must rise, and 1ep comes after 1ep"),
            ("of two units", "[1ep,200ba]", "give all in one unit"),
            ("of zero", "[0ep,1ep]", "with a finite number above 0"),
            (
                "without a unit",
                "[1,2ep]",
                "give a number with a unit, such as 2ep (epochs), 100ba (optimizer steps)",
            ),
            (
                "of an unknown unit",
                "[1epoch,2ep]",
                "give a number with a unit, such as 2ep (epochs)",
            ),
            ("below zero", "[-1ep,2ep]", "with a finite number above 0"),
            ("in parts of a step", "[1.5ba,3ba]", "ba are counted in whole ones"),
            ("that are too few", "[1ep]", ""),
            ("that are no list", "1ep", "give a list, such as"),
        )
    },
    **{
        f"batch sizes of {value}": (
            [*STEPS, f"{SCHEDULE}.batch_sizes=[4,{value},16]"],
            f"{SCHEDULE}.batch_sizes=",
            "1 to",
        )
        for value in (0, -8, 2.5, "True", "many")
    },
    "a stage that no epoch has the rows for": (
        [*STEPS, f"{SCHEDULE}.batch_sizes=[4,8,64]", "drop_last=True"],
        f"{SCHEDULE}=64",
        (
            "64 rows on each of 1 devices are more than an epoch's 32, and drop_last drops such a"
            " step; ask for 32 or fewer, or set drop_last=False"
        ),
    ),
    "a stage that is over within a step": (
        [*STEPS, f"{SCHEDULE}.batch_sizes=[16,2,4]", f"{SCHEDULE}.thresholds=[1sp,2sp]"],
        f"{SCHEDULE}=",
        "no step has batch 2, asked for from 1sp on",
    ),
    "a schedule with accumulation": (
        [*STEPS, "gradient_accumulation_steps=2"],
        "gradient_accumulation_steps=2",
        "its micro-batches follow from what fits; set it to 1",
    ),
    "a rule of the noise scale by tokens": (
        [
            f"{SCHEDULE}._component_=adaptive_batch.schedules.by_noise_scale",
            f"{SCHEDULE}.start=4",
            "batch_tokens=200",
        ],
        "batch_tokens=200",
        "the gradient noise scale is counted in rows; remove batch_tokens",
    ),
    "a ready rule that is not there": (
        [f"{SCHEDULE}._component_=adaptive_batch.schedules.stepz"],
        SCHEDULE,
        "near it: steps",
    ),
    "a ready rule without its arguments": (
        [f"{SCHEDULE}._component_=adaptive_batch.schedules.linear_ramp", f"{SCHEDULE}.start=4"],
        SCHEDULE,
        "",
    ),
    "a rule that is not callable": (
        [f"{SCHEDULE}=support.batch_rules.NOT_CALLABLE"],
        SCHEDULE,
        "give a function",
    ),
    "a rule of two arguments": (
        [f"{SCHEDULE}=support.batch_rules.takes_two"],
        SCHEDULE,
        "give a function rule(progress) -> rows of a step on one device, of positional arguments",
    ),
    "a rule that is a number": ([f"{SCHEDULE}=16"], f"{SCHEDULE}=16", "dotted path"),
    "a rule in a module that is not there": (
        [f"{SCHEDULE}=nowhere.f"],
        "nowhere.f",
        "no module nowhere",
    ),
    "a rule that raises": (
        [f"{SCHEDULE}=support.batch_rules.raises"],
        r"Progress\(.*steps=0",
        "KeyError: 'no such stage'",
    ),
    "a rule that raises later": (
        [f"{SCHEDULE}=support.batch_rules.raises_in_second_epoch"],
        r"Progress\(epoch=1",
        "KeyError: 'no such stage'",
    ),
    **{
        f"a rule that {name}": (
            [f"{SCHEDULE}=support.batch_rules.{name}"],
            rf"support\.batch_rules\.{name}\(Progress\(",
            "it must return what a step on one device holds: a whole number, 1 to 1000000000",
        )
        for name in ("returns_none", "returns_zero", "returns_float", "returns_huge")
    },
    "a rule by tokens whose answers change": (
        [
            *OF_LENGTHS,
            f"{SCHEDULE}=support.batch_rules.another_each_time",
            "batch_tokens=100",
            "long_rows=alone",
        ],
        "another_each_time",
        "when called again: with batch_tokens it must be a function of progress alone",
    ),
    # resume points
    **{
        f"{key}={value}": ([f"{key}={value}"], f"{key}=", "give a whole number, 1 or more")
        for key in ("save_every_n_steps", "keep_last_n_checkpoints")
        for value in (0, -1, 1.5, "x", "True")
    },
    **{
        f"resume_allow_changes={value}": (
            [f"resume_allow_changes={value}"],
            "resume_allow_changes=",
            "give the names of keys",
        )
        for value in (3, "True", "[3]", "{dataset: True}")
    },
    "an assumed maximum of zero": (
        ["preview=True", "probe.assumed_maximum=0"],
        "probe.assumed_maximum=0",
        "1 or more",
    ),
    "preview that is no switch": (["preview=maybe"], "preview='maybe'", "True or False"),
    # names
    **{
        f"{nearly} for {meant}": ([f"{nearly}=1"], f"{nearly}=1", f"{meant} is probably meant")
        for nearly, meant in {
            "micro_batchsize": "micro_batch_size",
            "micro_batch_token": "micro_batch_tokens",
            "batch_token": "batch_tokens",
            "lr_scale": "lr_scaling",
            "lr_scalling": "lr_scaling",
            "reference_batchsize": "reference_batch_size",
            "pad_to_multiple": "pad_to_multiple_of",
            "run_val_every_steps": "run_val_every_n_steps",
            "save_every_n_step": "save_every_n_steps",
            "keep_last_n_checkpoint": "keep_last_n_checkpoints",
            "batch_schedule": "batch_size_schedule",
            "batchsize_schedule": "batch_size_schedule",
            "lr_clok": "lr_clock",
            "lr_clocks": "lr_clock",
            "preveiw": "preview",
            "grow_beyond_max": "grow_beyond_maximum",
            "resume_allow_change": "resume_allow_changes",
            "log_gradient_noise": "log_gradient_noise_scale",
        }.items()
    },
    # the data
    "an empty dataset": (
        ["dataset._component_=support.components.empty_dataset"],
        "dataset=",
        "no rows",
    ),
    **{
        f"a dataset that {what}": (
            [f"dataset._component_=support.components.{name}"],
            "dataset=",
            remedy,
        )
        for what, name, remedy in (
            ("is None", "no_dataset", "what builds it returned None; give a map-style dataset"),
            (
                "is a stream",
                "Stream",
                "a Stream has no row by its number; give a map-style dataset",
            ),
            (
                "is a generator",
                "generator",
                "a generator has no row by its number; give a map-style dataset",
            ),
            ("has no length", "Endless", "has no len(); give a map-style dataset"),
            (
                "cannot be built",
                "unbuildable",
                "it cannot be built: KeyError: 'column'; check its source and arguments",
            ),
        )
    },
    "a dataset that is streamed": (
        ["dataset.streaming=True"],
        "dataset='json'",
        "rows by number, and streaming=False",
    ),
    "a dataset that is packed from a stream": (
        ["dataset.streaming=True", "dataset.packed=True"],
        "dataset='json'",
        "has no len(); set streaming=False",
    ),
    "a dataset to validate on without a length": (
        ["dataset_val._component_=support.components.Endless", "run_val_every_n_steps=1"],
        "dataset_val='support.components.Endless'",
        "streaming=False",
    ),
    # rows
    **{
        f"{what} where {key} reads rows": ([*ODD, f"dataset.row={row}", key], "dataset=", why)
        for what, row, why in (
            (
                "a row that raises",
                "raises",
                "row 5 cannot be read (ValueError: no text); correct it, or filter it out",
            ),
            (
                "a row longer than the model takes",
                "long",
                "row 5 has 65 tokens, and the model takes 64 at most; set token",
            ),
            (
                "a row of another vocabulary",
                "foreign",
                f"row 5 has the token id {VOCABULARY}, and the model's vocabulary",
            ),
            (
                "a label of another vocabulary",
                "foreign_label",
                f"row 5 has the token id {VOCABULARY}, and the model's",
            ),
            (
                "a negative token id",
                "negative",
                "row 5 has the token id -3, and the model's vocabulary has 0 to",
            ),
            ("a row without tokens", "empty", "row 5 has no tokens; filter it out"),
            (
                "a row of broken numbers",
                "floats",
                "row 5 must be a mapping with a list or 1-D tensor of whole numbers",
            ),
            (
                "a row with other labels",
                "unlike",
                "row 5 has 12 tokens and 13 labels; give each token its label",
            ),
        )
        for key in ("batch_tokens=200", PROBE)
    },
    # what torchtune's components would take for something else, or fail on once weights are loaded
    **{
        f"{setting} for a component": ([setting], shown, remedy)
        for setting, shown, remedy in (
            ("tokenizer.path=null", "tokenizer.path=None", "null is none of its values; give one"),
            (
                "loss.num_output_chunks=null",
                "loss.num_output_chunks=None",
                "give one, or leave it out for 8",
            ),
            (
                "loss._component_=torchtune.modules.loss.ForwardKLWithChunkedOutputLoss",
                "loss={'_component_': 'torchtune.modules.loss.ForwardKL",
                "it cannot be computed (",
            ),
            ("loss.ignore_index=abc", "loss.ignore_index='abc'", "give a whole number"),
            ("optimizer.amsgrad=1", "optimizer.amsgrad=1", "give True or False"),
            ("optimizer.fused=abc", "optimizer.fused='abc'", "give True or False"),
            ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]", "give a list of numbers"),
            ("optimizer.betas=[0.9,1.5]", "optimizer.betas=1.5", "give a share of at least 0"),
            ("optimizer.dampening=abc", "optimizer.dampening='abc'", "give a share"),
            ("model.tie_word_embeddings=abc", "model.tie_word_embeddings='abc'", "True or False"),
            ("model.rope_base=0", "model.rope_base=0", "give a number above 0"),
            ("model.norm_eps=-1", "model.norm_eps=-1", "give a number above 0"),
            ("dataset.new_system_prompt=[]", "dataset.new_system_prompt=", "give a text"),
            ("checkpointer.checkpoint_files=[]", "checkpoint_files=", "give those of the model"),
            ("dataset.cache_dir=-1", "dataset.cache_dir=-1", "give a path"),
            (
                "tokenizer.merges_file=vocab.json",
                "tokenizer.merges_file='vocab.json'",
                "merges are lines of text; give merges.txt",
            ),
            ("metric_logger.filename=[]", "metric_logger.filename=", "give a text"),
            ("tensor_parallel_plan=abc", "tensor_parallel_plan='abc'", "give tensor_parallel_plan"),
            ("low_cpu_ram=abc", "low_cpu_ram='abc'", "give True or False"),
            ("collate_fn=[]", "collate_fn=", "give the dotted path of a function"),
            (
                "tokenizer.path=/nowhere/vocab.json",
                "tokenizer='torchtune",
                "'/nowhere/vocab.json'; give the tokenizer's files",
            ),
            ("tokenizer.nosuch=1", "tokenizer='torchtune", "unexpected keyword argument 'nosuch'"),
            ("tokenizer=null", "tokenizer=None", "give a block with _component_"),
            ("tokenizer.max_seq_len=0", "tokenizer.max_seq_len=0", "whole number, 1 or more"),
            ("tokenizer.max_seq_len=-5", "tokenizer.max_seq_len=-5", "whole number, 1 or more"),
            ("dataset.split=nosuch", "dataset='json'", 'ValueError: Unknown split "nosuch"'),
            (
                "dataset.data_files=/nowhere",
                "dataset='json'",
                "FileNotFoundError: Unable to find '/nowhere'",
            ),
            ("dataset.packed=maybe", "dataset.packed='maybe'", "True or False"),
            ("dataset.train_on_input=maybe", "dataset.train_on_input='maybe'", "True or False"),
            ("model.num_layers=0", "model.num_layers=0", "whole number, 1 or more"),
            ("model.num_heads=0", "model.num_heads=0", "whole number, 1 or more"),
            ("model.embed_dim=9999999999999999999999999", "model.embed_dim=9999999999", "or less"),
            ("loss.num_output_chunks=0", "loss.num_output_chunks=0", "whole number, 1 or more"),
            ("metric_logger=null", "metric_logger=None", "give a block with _component_"),
            ("collate_fn=3", "collate_fn=3", "give the dotted path of a function"),
            ("collate_fn=torch.pi", "collate_fn='torch.pi'", "it cannot be built: TypeError"),
            (
                "collate_fn=torch.nn.Linear",
                "collate_fn='torch.nn.Linear'",
                "it cannot be built: TypeError: missing a required",
            ),
            ("profiler=3", "profiler=3", "give a block, such as {enabled: True}"),
            ("profiler.enabled=maybe", "profiler.enabled='maybe'", "True or False"),
            ("profiler.enable=True", "profiler='torchtune", "unexpected keyword argument 'enable'"),
        )
    },
    **{
        f"a profile of {setting}": (
            ["profiler.enabled=True", setting],
            "profiler='torchtune",
            "it cannot be built",
        )
        for setting in (
            "profiler.wait_steps=-1",
            "profiler.active_steps=0",
        )
    },
    **{
        f"a profile of another {setting}": (["profiler.enabled=True", setting], names, remedy)
        for setting, names, remedy in (
            ("profiler.wait_steps=abc", "profiler.wait_steps='abc'", "give a whole number"),
            ("profiler.output_dir=3", "profiler.output_dir=3", "give a text"),
            ("profiler.with_flops=abc", "profiler.with_flops='abc'", "give True or False"),
            ("profiler.cpu=False", "profiler.cpu=False", "nothing else can be profiled here"),
        )
    },
    **{
        f"{value} warm-up steps": (
            [*COSINE, f"lr_scheduler.num_warmup_steps={value}"],
            "num_warmup_steps=",
            "0 or more",
        )
        for value in ("abc", -1, 2.5, "True")
    },
    # arguments that cannot be read
    **{
        f"the argument {name}": ([argument], "argument=", remedy)
        for name, argument, remedy in (
            ("of many digits", f"batch_size={'9' * 5000}", "it cannot be read: Exceeds the limit"),
            ("of a torn list", "batch_size=[1", "it cannot be read: while parsing a flow sequence"),
            ("of a torn block", "model.x={a", "it cannot be read: while parsing a flow mapping"),
        )
    },
    "an argument that removes nothing": (
        ["batch_size=2", "~nosuch.things"],
        "argument='~nosuch.things'",
        "has no such key to remove; leave this out, and the argument that sets nosuch.things",
    ),
    "a dataset smaller than one batch": (["batch_size=33"], "batch_size=33", "the dataset has 32"),
}


@pytest.mark.parametrize(("overrides", "names", "remedy"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_before_weights_load(small, overrides, names, remedy):
    output = small.fresh_folder()
    # weights that cannot be read: whatever is refused later than they load fails as that instead
    base = output / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"not weights")
    (base / "config.json").write_text((small.folder / "base" / "config.json").read_text())
    with pytest.raises(AdaptiveBatchError) as refused:
        small.run_in_process(
            OURS, f"output_dir={output / 'run'}", f"checkpointer.checkpoint_dir={base}", *overrides
        )
    assert isinstance(refused.value, ValueError), refused.value
    assert re.search(names, str(refused.value)) or names in str(refused.value)
    assert remedy in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(output.glob("run/epoch_*"))


def test_tensorboard_that_is_missing_is_named_and_torchtunes_logger_is_not_half_made(
    small, monkeypatch
):
    monkeypatch.setattr("adaptive_batch.torchtune.log.find_spec", lambda name: None)
    logger = "torchtune.training.metric_logging.TensorBoardLogger"
    monkeypatch.setattr(logger, lambda **settings: pytest.fail("it was made"))
    with pytest.raises(SettingError) as refused:
        small.run_in_process(OURS, f"metric_logger._component_={logger}")
    assert str(refused.value) == (
        f"metric_logger={logger!r}: tensorboard is not installed: pip install tensorboard"
    )


@pytest.mark.parametrize("recipe", [OURS, "adaptive_probe", "adaptive_estimate"])
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("tokenizer.max_seq_len=0", r"^tokenizer\.max_seq_len=0: "),
        ("tokenizer.nosuch=1", r"tokenizer='[\w.]*': it cannot be built: TypeError: .*'nosuch'"),
        ("dataset.packed=maybe", r"^dataset\.packed='maybe': "),
        ("dataset.split=nosuch", r"dataset='json': it cannot be built: ValueError: Unknown split"),
        ("model.num_layers=0", r"^model\.num_layers=0: "),
        ("collate_fn=3", r"^collate_fn=3: "),
        ("profiler=3", r"^profiler=3: "),
        ("batch_size=[1", r"^argument='batch_size=\[1': "),
    ],
)
def test_what_no_component_takes_is_refused_by_each_recipe(small, recipe, setting, says):
    with pytest.raises(SettingError, match=says) as refused:
        small.run_in_process(recipe, setting, "preview=True", "estimate.devices=1GiB")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("recipe", [OURS, "adaptive_probe", "adaptive_estimate"])
@pytest.mark.parametrize("key", ["dataset", "collate_fn", "model", "optimizer"])
def test_a_component_that_ends_the_program_is_an_error(small, recipe, key):
    exits = (f"{key}=support.components.exits", "estimate.devices=1GiB")
    with pytest.raises(
        AdaptiveBatchError, match=r"sys\.exit\(0\) was called in exits \(.*components\.py:\d+\)"
    ) as ended:
        small.run_in_process(recipe, *exits)
    assert "\n" not in str(ended.value)


@pytest.mark.slow
def test_on_the_terminal_a_mistake_is_one_line(small):
    finished = small.run_in_fork(OURS, "use_max_batch_size=True", expect=1)
    last = finished.output.strip().splitlines()[-1]
    assert (
        last
        == "SettingError: use_max_batch_size=True: there is no such key; use_maximum_batch_size is"
        " probably meant"
    )
    assert "Traceback" not in finished.output


@pytest.mark.slow
def test_a_config_that_is_neither_file_nor_shipped_is_refused_with_what_there_is(small):
    finished = small.run_in_fork(OURS, config="demo_gpu", expect=1)
    assert "--config='demo_gpu'" in finished.output
    assert "demo_cpu" in finished.output


@pytest.mark.parametrize("model_type", ["LLAMA3", "T5_ENCODER"])
def test_weights_of_another_family_are_refused_as_they_are_read(small, model_type):
    with pytest.raises(
        SettingError, match=rf"^checkpointer\.model_type='{model_type}': the weights"
    ):
        small.run_in_process(OURS, f"checkpointer.model_type={model_type}")


def test_a_model_that_no_host_holds_is_refused_as_its_weights_load(small):
    with pytest.raises(
        DoesNotFitError, match=r"the weights alone .* fewer tokens in model\.max_seq"
    ):
        small.run_in_process(OURS, "model.max_seq_len=1000000000000")
