"""Losses for `AdaptiveStep`: means over tokens and sequences, DAPO, Dr. GRPO, DPO, distillation.

docs/loops.md#losses explains the choice. Run it with `python examples/snippets/losses.py`.
"""

import torch
from torch import nn
from torch.nn.functional import kl_div, logsigmoid

from adaptive_batch import AdaptiveStep, StepOptions

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(53, 16), nn.Linear(16, 53))
reference = nn.Sequential(nn.Embedding(53, 16), nn.Linear(16, 53)).requires_grad_(False)


def make_batch(lengths):
    columns = torch.arange(max(lengths))
    attention_mask = columns < torch.tensor(lengths)[:, None]
    tokens = torch.randint(1, 53, attention_mask.shape) * attention_mask
    with torch.no_grad():
        old_log_probs = log_probs(model, tokens)
    return {
        "tokens": tokens,
        "attention_mask": attention_mask,
        "completion_mask": attention_mask & (columns >= 2),
        "old_log_probs": old_log_probs,
        "advantages": torch.randn(len(lengths)),
    }


def log_probs(model, tokens):
    """Return the log-probability of each token, 0 of the first: `[rows, columns]`."""
    predicted = model(tokens[:, :-1]).log_softmax(-1)
    of_tokens = predicted.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(of_tokens, (1, 0))


def token_losses(batch):
    """Return the clipped loss of PPO for each token: `[rows, columns]`, 0 outside completions."""
    ratio = (log_probs(model, batch["tokens"]) - batch["old_log_probs"]).exp()
    advantages = batch["advantages"][:, None]
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return losses * batch["completion_mask"]


def completion_tokens(batch):
    return batch["completion_mask"].sum()


# Mean over tokens: num_labels counts tokens.


def token_mean(part):
    mean = token_losses(part.batch).sum() / completion_tokens(part.batch)
    loss = mean * part.share
    loss.backward()
    return loss.detach()


step = AdaptiveStep(model, token_mean, micro_batch_size=3, num_labels=completion_tokens)
batch = make_batch([5, 9, 4, 8, 7, 12, 6])
print(f"mean over tokens {sum(step(batch)):.4f}, {step.num_micro_batches} parts")


# GRPO: the mean over rows of the mean over tokens. The batch has no labels, so rows are counted.


def sequence_mean(part):
    lengths = part.batch["completion_mask"].sum(dim=1).clamp(min=1)
    loss = (token_losses(part.batch).sum(dim=1) / lengths).mean() * part.share
    loss.backward()
    return loss.detach()


step = AdaptiveStep(model, sequence_mean, micro_batch_size=3)
print(f"mean over sequences {sum(step(batch)):.4f}")


# DAPO: the mean over the tokens of all ranks.
step = AdaptiveStep(
    model,
    token_mean,
    micro_batch_size=3,
    num_labels=completion_tokens,
    options=StepOptions(count_labels_over="ranks"),
)
print(f"DAPO {sum(step(batch)):.4f}")


# Dr. GRPO: the sum over tokens, divided by a constant for each sequence.
most_tokens = 16


def dr_grpo(part):
    loss = token_losses(part.batch).sum() / (part.num_rows * most_tokens) * part.share
    loss.backward()
    return loss.detach()


step = AdaptiveStep(model, dr_grpo, micro_batch_size=3)
print(f"Dr. GRPO {sum(step(batch)):.4f}")


# DPO: a row is a pair, which is never split.


def dpo(part):
    rewards = {}
    for answer in ("chosen", "rejected"):
        tokens = part.batch[answer]
        mask = part.batch[f"{answer}_mask"]
        ratio = log_probs(model, tokens) - log_probs(reference, tokens)
        rewards[answer] = 0.1 * (ratio * mask).sum(dim=1)
    loss = -logsigmoid(rewards["chosen"] - rewards["rejected"]).mean() * part.share
    loss.backward()
    return loss.detach()


def make_pairs(lengths):
    pairs = {}
    for answer in ("chosen", "rejected"):
        answers = make_batch(lengths)
        pairs[answer] = answers["tokens"]
        pairs[f"{answer}_mask"] = answers["completion_mask"]
    return pairs


step = AdaptiveStep(model, dpo, micro_batch_size=2)
print(f"DPO {sum(step(make_pairs([5, 9, 4, 8, 7]))):.4f}")


# Distillation: one loss is weighted by the ratio of both losses over the whole batch.


def distillation_losses(batch):
    """Return cross-entropy and forward KL, summed over the tokens of completions."""
    mask = batch["completion_mask"][:, 1:]
    student = model(batch["tokens"][:, :-1]).log_softmax(-1)
    teacher = reference(batch["tokens"][:, :-1]).log_softmax(-1)
    chosen = student.gather(-1, batch["tokens"][:, 1:, None]).squeeze(-1)
    divergence = kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return -(chosen * mask).sum(), (divergence * mask).sum()


def sums(part):
    cross_entropy, divergence = distillation_losses(part.batch)
    return {"cross_entropy": cross_entropy, "divergence": divergence}


def distill(part):
    ratio = part.statistics["cross_entropy"] / part.statistics["divergence"]
    cross_entropy, divergence = distillation_losses(part.batch)
    mean = (cross_entropy + ratio * divergence) / completion_tokens(part.batch)
    loss = mean * part.share
    loss.backward()
    return loss.detach()


step = AdaptiveStep(
    model, distill, micro_batch_size=3, num_labels=completion_tokens, statistics=sums
)
print(f"distillation {sum(step(batch)):.4f}")
