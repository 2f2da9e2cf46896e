import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
byte_level = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=byte_level, eos_token="<eos>", pad_token="<pad>"
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=264,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
)
dataset = Dataset.from_dict({"prompt": ["q: "] * 4, "completion": ["ab", "abc"] * 2})
