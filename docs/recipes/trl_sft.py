"""TRL's SFTTrainer: supervised finetuning on prompts and answers.

    python docs/recipes/trl_sft.py

SFTTrainer is a Trainer, so use_flash_optimizer takes it. Started again it goes on from its last checkpoint.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from flashdist import cast_model
from flashdist.integrations.transformers import use_flash_optimizer

FOLDER = "runs/trl_sft"

# A tokenizer of a few words and a small model with drawn weights, so that nothing is downloaded. Real ones:
# AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
words = ["<pad>", "<end>", "<unknown>", "plus", "is", *map(str, range(20))]
vocabulary = {word: i for i, word in enumerate(words)}
table = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=table, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=vocabulary["<end>"],
    pad_token_id=vocabulary["<pad>"],
)
model = cast_model(LlamaForCausalLM(config))

data = Dataset.from_list(
    [{"prompt": f"{a} plus {b} is", "completion": f" {a + b}"} for a in range(10) for b in range(10)]
)
arguments = SFTConfig(
    output_dir=FOLDER,
    max_steps=20,
    save_steps=10,
    per_device_train_batch_size=20,
    learning_rate=1e-2,
    bf16=False,  # no autocast: the weights are bf16 themselves
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
)
trainer = use_flash_optimizer(SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer))
trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER))

losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
opt = trainer.optimizer
