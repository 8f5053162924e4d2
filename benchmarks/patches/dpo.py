"""TRL's DPOTrainer: of a signature, its own docstring is preferred to another's."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained("model"),
    args=DPOConfig(
        "out",
        max_length=48,
        per_device_train_batch_size=6,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_json("pairs.jsonl"),
    processing_class=AutoTokenizer.from_pretrained("model"),
)
trainer.train()
print("tokens", trainer.state.log_history[-2]["num_tokens"])
