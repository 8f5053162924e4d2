"""Logged values of micro-batches are reduced to the value of the batch."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchmetrics import CatMetric, SumMetric

from adaptive_batch.integrations.part_logs import PartLogs, over_parts

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "reduction", "expected"),
    [
        ([1.0, 5.0], "mean", 4.0),
        ([1.0, 5.0], "sum", 6.0),
        ([1, 5], "min", 1),
        ([torch.tensor(1.0), torch.tensor([5.0])], "max", 5.0),
        # NaN is the metric of a micro-batch without relevant rows.
        ([NAN, 5.0], "mean", 5.0),
        ([NAN, 5.0], "min", 5.0),
        (["one", "two"], "mean", "two"),
        ([None, 5.0], "sum", 5.0),
    ],
)
def test_numbers_are_reduced_and_of_other_values_the_last_is_kept(values, reduction, expected):
    assert over_parts(values, [0.25, 0.75], reduction) == expected


def test_the_reduction_of_only_nan_is_nan():
    for reduction in ("mean", "min"):
        assert math.isnan(over_parts([NAN, NAN], [0.25, 0.75], reduction))


class Logs(PartLogs):
    """Logs nothing."""

    def record(self, calls, *arguments, **keywords):
        pass

    def log_values(self, key, calls, weights):
        pass


def logs_of(holder):
    return Logs(holder, [holder], skipped=())


class Refuses(OrderedDict):
    """A mapping that refuses `update` and `clear`, like ModelOutput in Transformers."""

    def update(self, *arguments, **keywords):
        raise TypeError

    clear = update


def test_a_snapshot_restores_attributes_and_their_contents():
    total = torch.zeros(2)
    with torch.inference_mode():
        of_evaluation = torch.zeros(2)
    holder = SimpleNamespace(
        total=total,
        of_evaluation=of_evaluation,
        expanded=torch.zeros(1).expand(2),
        pair=(1, 2),
        output=Refuses(logits=total),
        recent=deque([1, 2], maxlen=2),
        counts=Counter(rows=1),
        array=np.zeros(2),
        metrics={"sum": SumMetric(), "cat": CatMetric()},
        in_list=[SumMetric()],
        nested={"train": defaultdict(list, loss=[1.0]), "total": total},
    )
    holder.nested["itself"] = holder.nested
    holder.metrics["sum"].parents = [holder.metrics["sum"]]
    before = {**vars(holder)}
    holder.metrics["cat"].update(1.0)
    undo = logs_of(holder).snapshot()
    for _ in range(2):
        holder.total += 1
        with torch.inference_mode():
            of_evaluation.add_(1)
        holder.pair = [1]
        holder.recent.append(3)
        holder.counts["rows"] += 1
        holder.array += 1
        for metric in (*holder.metrics.values(), *holder.in_list):
            metric(2.0)
        holder.nested["train"]["loss"].append(2.0)
        holder.nested["train"]["other"].append(2.0)
        holder.added = (1,)
        undo()
        assert vars(holder).keys() == before.keys()
        assert all(getattr(holder, name) is value for name, value in before.items())
        assert holder.nested["total"] is holder.output["logits"] is total
        assert total.tolist() == of_evaluation.tolist() == [0.0, 0.0]
        assert [*holder.recent] == [1, 2]
        assert holder.counts == {"rows": 1}
        assert holder.array.tolist() == [0.0, 0.0]
        assert holder.metrics["sum"].sum_value == holder.in_list[0].sum_value == 0
        assert holder.metrics["cat"].compute() == 1.0
        assert holder.nested["train"] == {"loss": [1.0]}
        assert holder.nested["itself"] is holder.nested


def test_the_dummy_part_of_a_rank_leaves_no_trace():
    holder = SimpleNamespace(num_parts=0, log=None)
    logs = logs_of(holder)
    for share in (0.5, 0.0, 0.5):
        part = SimpleNamespace(is_trial=False, is_first=not logs.calls, share=share)
        with logs.of_part(part, share):
            holder.num_parts += 1
    assert holder.num_parts == len(logs.calls) == 2
    assert logs.weights == [0.5, 0.5]
