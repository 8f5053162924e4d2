"""TRL's GRPOTrainer: completions of many different words are rewarded."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **columns):
    return [float(len(set(completion.split()))) for completion in completions]


trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained("model"),
    reward,
    args=GRPOConfig(
        "out",
        per_device_train_batch_size=12,
        num_generations=4,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_json("prompts.jsonl"),
    processing_class=AutoTokenizer.from_pretrained("model"),
)
trainer.train()
print("tokens", trainer.state.log_history[-2]["num_tokens"])
