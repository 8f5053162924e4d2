"""A stream of `datasets`, read by torchdata's StatefulDataLoader in a loop of one's own."""

import torch
from datasets import Dataset
from torch import nn
from torch.nn.functional import cross_entropy
from torchdata.stateful_dataloader import StatefulDataLoader

torch.manual_seed(0)
texts = Dataset.from_json("texts.jsonl").to_iterable_dataset(num_shards=2)
stream = texts.map(lambda row: {"bytes": list(row["text"].encode()[:32].ljust(32))})
loader = StatefulDataLoader(
    stream.select_columns("bytes").with_format("torch"), batch_size=6, num_workers=2
)
model = nn.Sequential(
    nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 256)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for number, batch in zip(range(6), loader, strict=False):
    logits = model(batch["bytes"][:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), batch["bytes"][:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {number}: loss {loss:.4f}")
