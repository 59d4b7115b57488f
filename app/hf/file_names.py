"""File names of a Hugging Face model, in a module that loads no torch."""

CONFIG_JSON = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # index of several weight files
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
TOKENIZER = "tokenizer.json"  # of the `tokenizers` library
SENTENCEPIECE = "tokenizer.model"
