"""TRL's SFTTrainer on the standard library's docstrings."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained("model"),
    SFTConfig(
        "out",
        max_length=48,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_json("texts.jsonl"),
    processing_class=AutoTokenizer.from_pretrained("model"),
)
trainer.train()
print("tokens", trainer.state.log_history[-2]["num_tokens"])
