"""Functions for `split=`: vision-language rows, detection, graphs, CTC targets, time-first batches.

The file checks each function: parts of two rows must have the gradient of the whole batch.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss

from adaptive_batch import AdaptiveStep, SplitBatch

torch.manual_seed(0)


def trained(model, loss_of, batch, split=None):
    """Train on a batch in parts of two rows, and check that its gradient is that of the whole."""

    def forward_backward(part):
        loss = loss_of(part.batch) * part.share
        loss.backward()
        return loss.detach()

    loss_of(batch).backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    losses = AdaptiveStep(model, forward_backward, micro_batch_size=2, split=split)(batch)
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)
    return len(losses)


# Vision-language models: patches of all images are concatenated, as in Qwen's processors.
# The image tokens of a row give the number of its patches.
IMAGE = 9
rows_of_text = torch.tensor(
    [[9, 9, 1, 2], [9, 9, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
)  # one image, one, none, two
batch = {
    "input_ids": rows_of_text,
    "pixel_values": torch.randn(8, 6),  # two patches an image
    "image_grid_thw": torch.tensor([[1, 1, 2]] * 4),
    "labels": torch.tensor([0, 1, 2, 0]),
}
model = nn.ModuleDict(
    {"text": nn.Embedding(10, 8), "image": nn.Linear(6, 8), "head": nn.Linear(8, 3)}
)


def loss_of(batch):
    hidden = model["text"](batch["input_ids"])
    is_image = (batch["input_ids"] == IMAGE)[..., None]
    hidden = hidden.masked_scatter(is_image, model["image"](batch["pixel_values"]))
    return cross_entropy(model["head"](hidden.mean(1)), batch["labels"])


def split(batch):
    patches_of_images = batch["image_grid_thw"].prod(1)
    patches_of_rows = (batch["input_ids"] == IMAGE).sum(1)
    row_of_patch = torch.repeat_interleave(torch.arange(len(patches_of_rows)), patches_of_rows)
    first_patch = patches_of_images.cumsum(0) - patches_of_images
    row_of_image = row_of_patch[first_patch]

    def part(rows):
        rows = torch.tensor(rows)
        return {
            "input_ids": batch["input_ids"][rows],
            "labels": batch["labels"][rows],
            "pixel_values": batch["pixel_values"][torch.isin(row_of_patch, rows)],
            "image_grid_thw": batch["image_grid_thw"][torch.isin(row_of_image, rows)],
        }

    return SplitBatch(len(batch["input_ids"]), part)


assert trained(model, loss_of, batch, split) == 2


# Detection: each item of the two tuples is a row.
model = nn.Conv2d(3, 2, 3)
images = tuple(torch.randn(3, 8 + number, 8) for number in range(4))
targets = tuple({"boxes": torch.rand(1 + number, 4), "label": number % 2} for number in range(4))


def loss_of(batch):
    images, targets = batch
    logits = torch.stack([model(image[None]).mean((2, 3))[0] for image in images])
    return cross_entropy(logits, torch.tensor([target["label"] for target in targets]))


def split(batch):
    def part(rows):
        return tuple(tuple(values[row] for row in rows) for values in batch)

    return SplitBatch(len(batch[0]), part)


assert trained(model, loss_of, (images, targets), split) == 2


# Graphs: nodes and edges of all graphs are concatenated, as in PyTorch Geometric.
# A part renumbers its nodes.
model = nn.Linear(4, 3)
batch = {
    "x": torch.randn(12, 4),
    "graph": torch.arange(12) // 3,
    "edges": torch.stack(
        [torch.arange(12), torch.arange(12) // 3 * 3]
    ),  # from each node to the first
    "y": torch.tensor([0, 1, 2, 1]),
}


def loss_of(batch):
    source, target = batch["edges"]
    messages = batch["x"].index_add(0, target, batch["x"][source])
    graphs = torch.zeros(len(batch["y"]), 4).index_add(0, batch["graph"], messages)
    return cross_entropy(model(graphs), batch["y"])


def split(batch):
    def part(rows):
        rows = torch.tensor(rows)
        is_own = torch.isin(batch["graph"], rows)
        number = is_own.cumsum(0) - 1
        edges = batch["edges"]
        return {
            "x": batch["x"][is_own],
            "graph": torch.searchsorted(rows, batch["graph"][is_own]),
            "edges": number[edges[:, is_own[edges[0]]]],
            "y": batch["y"][rows],
        }

    return SplitBatch(len(batch["y"]), part)


assert trained(model, loss_of, batch, split) == 2


# CTC: the targets of all rows are in one tensor.
model = nn.Linear(4, 5)
batch = {
    "x": torch.randn(4, 9, 4),
    "frames": torch.tensor([9, 8, 7, 6]),
    "targets": torch.randint(1, 5, (10,)),
    "lengths": torch.tensor([1, 2, 3, 4]),
}


def loss_of(batch):
    log_probs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    return ctc_loss(log_probs, batch["targets"], batch["frames"], batch["lengths"])


def split(batch):
    targets = batch["targets"].split(batch["lengths"].tolist())

    def part(rows):
        own = {key: batch[key][rows] for key in ("x", "frames", "lengths")}
        return {**own, "targets": torch.cat([targets[row] for row in rows])}

    return SplitBatch(len(batch["x"]), part)


assert trained(model, loss_of, batch, split) == 2


# Time first: rows are the second dimension.
model = nn.GRU(4, 3)
inputs, classes = torch.randn(6, 4, 4), torch.tensor([0, 1, 2, 0])  # [time, rows, features]


def loss_of(batch):
    inputs, classes = batch
    _, hidden = model(inputs)
    return cross_entropy(hidden[0], classes)


def split(batch):
    inputs, classes = batch
    return SplitBatch(len(classes), lambda rows: (inputs[:, rows], classes[rows]))


assert trained(model, loss_of, (inputs, classes), split) == 2
