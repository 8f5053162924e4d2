"""Logs that follow from runs of a few layers are those of all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from support.fake_steps import WIDTH, WORDS, Decoder, Layer, fake_step, run
from torch import nn

from adaptive_batch.estimate import CudaKernels, FakeDevice
from adaptive_batch.estimate.step_log import Phase

LAYERS = 8
# With and without a sort of tokens and buffers of reductions.
SHAPES = [(2, 24), (3, 24), (5, 40), (33, 100), (8, 60), (70, 50), (40, 90)]


class Apart(nn.Module):
    """Layers in no list of PyTorch's, of which none is left out."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, place: int) -> nn.Module:
        return list(self.children())[place]

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()


class Wide(Layer):
    def __init__(self, *, width: int = 5) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, width * WIDTH), nn.Linear(width * WIDTH, WIDTH))


class Repeated(Layer):
    """The place of the layer in its list, and an option that decides what it runs."""

    def __init__(self, place: int, *, times: int) -> None:
        super().__init__()
        self.place = place
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x


class Windowed(Repeated):
    """Each has a buffer of its own size, and every other one more of them where rows are long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_long = self.place % 2 and x.shape[1] > SHAPES[0][1]
        for _ in range(1 + is_long):
            x = x + torch.zeros(5000 * (1 + self.place)).sum()
        return super().forward(x)


class Hidden(Layer):
    """Has an option where none is looked for, and a buffer that follows from it: of the size of
    other tensors at the first shape alone.
    """

    def __init__(self, *, grows: bool) -> None:
        super().__init__()
        self.options = [grows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = SHAPES[0]
        elements = x.numel() if self.options[0] else rows * length * WIDTH
        buffer = torch.zeros(elements)
        return super().forward(x + buffer.sum())


class Stacked(Decoder):
    """Reads what every layer returned: a tensor grows with their number."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        hidden = []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        return torch.stack(hidden).mean(0) @ self.embed.weight.T


class Chunked(Decoder):
    """Returns its logits in chunks, of which the last is shorter at some lengths."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        chunks = []
        for chunk in x.chunk(8, dim=1):
            logits = chunk @ self.embed.weight.T
            # So many that those of the next chunk are no neighbours of the first.
            for _ in range(6):
                logits = logits.tanh()
            chunks.append(logits)
        return torch.cat(chunks, dim=1)


class Indexed(Decoder):
    """Cannot run without all of its layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for place in range(LAYERS):
            x = self.layers[place](x)
        return x @ self.embed.weight.T


def with_layers(layers: list[nn.Module]) -> Decoder:
    model = Decoder(layers=0)
    model.layers = nn.ModuleList(layers)
    return model


def with_frozen_words() -> Decoder:
    model = Decoder(layers=LAYERS)
    model.embed.requires_grad_(False)
    return model


class Adapted(Layer):
    """Trains an adapter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.adapter(x)


class Translator(Decoder):
    """A trained encoder, and a decoder whose first layer is given frozen words."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.layers = nn.ModuleList(Adapted() for _ in range(LAYERS))
        self.embed.requires_grad_(False)
        self._modules = {"encoder": nn.Embedding(WORDS, WIDTH), **self._modules}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.encoder(tokens).mean()


def phases(
    model: nn.Module,
    *,
    in_list: bool,
    accumulates: bool,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> tuple[list[Phase], int]:
    """The logs of all shapes, and how often the layer in the middle ran."""
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    if not in_list:
        model.layers = Apart(model.layers)
    model.layers[len(model.layers) // 2].register_forward_hook(count)
    device = FakeDevice(CudaKernels((9, 0), 132))
    step = fake_step("AdamW foreach", model=model, device=device, accumulates=accumulates)
    runs = 0
    logs = [
        step.phase(partial(run, model, device.batch, rows, length=length), is_first=not accumulates)
        for rows, length in shapes
    ]
    return logs, runs


MODELS: dict[str, Callable[[], Decoder]] = {
    "alike": partial(Decoder, layers=LAYERS),
    "checkpointing": partial(Decoder, layers=LAYERS, checkpointing=True),
    "one is wider": lambda: with_layers(
        [Wide() if place == 4 else Layer() for place in range(LAYERS)]
    ),
    "numbered": lambda: with_layers([Repeated(place, times=1) for place in range(LAYERS)]),
    "every other one runs more where rows are long": lambda: with_layers(
        [Windowed(place, times=1) for place in range(LAYERS)]
    ),
    "an option differs": lambda: with_layers(
        [Repeated(place, times=1 + (place in (2, 5))) for place in range(LAYERS)]
    ),
    "an option is hidden": lambda: with_layers(
        [Hidden(grows=place in (0, LAYERS - 1)) for place in range(LAYERS)]
    ),
    "the last hides an option": lambda: with_layers(
        [Hidden(grows=place == LAYERS - 1) for place in range(LAYERS)]
    ),
    "nothing is trained before": with_frozen_words,
    "an encoder is trained before": Translator,
    "logits are chunked": partial(Chunked, layers=LAYERS),
    "all are stacked": partial(Stacked, layers=LAYERS),
    "all are needed": partial(Indexed, layers=LAYERS),
}


@pytest.mark.parametrize(
    ("name", "accumulates"), [*((name, True) for name in MODELS), ("alike", False)]
)
def test_logs_are_those_of_all_layers(name, accumulates):
    made = MODELS[name]
    with torch.device("meta"):
        models = [made(), made()]
    logs, runs = phases(models[0], in_list=True, accumulates=accumulates)
    expected, all_runs = phases(models[1], in_list=False, accumulates=accumulates)
    assert logs == expected
    if name in ("alike", "numbered", "nothing is trained before"):
        # The others run what the one that is kept does.
        assert runs < all_runs / 2
    if name == "an encoder is trained before":
        assert runs < all_runs
    if name in ("all are needed", "an option is hidden"):
        assert runs == all_runs


def test_chunks_of_two_sizes_follow_from_chunks_of_one():
    equal = [(33, 96), (34, 96), (35, 96)]
    with torch.device("meta"):
        models = [Chunked(layers=LAYERS), Chunked(layers=LAYERS)]
    of_equal = phases(models[0], in_list=True, accumulates=True, shapes=equal)
    of_both = phases(models[1], in_list=True, accumulates=True, shapes=[*equal, (33, 100)])
    assert of_both[1] == of_equal[1]


def test_a_script_that_fails_without_a_layer_names_its_own_error():
    class Broken(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if tokens.shape[1] > 60:
                raise ValueError("too long")
            return super().forward(tokens)

    with torch.device("meta"):
        model = Broken(layers=LAYERS)
    device = FakeDevice(CudaKernels((9, 0), 132))
    step = fake_step(model=model, device=device)
    for rows in (2, 3):
        step.phase(partial(run, model, device.batch, rows, length=40), is_first=False)
    with pytest.raises(ValueError, match=r"^too long$"):
        step.phase(partial(run, model, device.batch, 2, length=70), is_first=False)
    assert len(model.layers) == LAYERS
