"""What the files of a model are called; here, for who reads no weights."""

CONFIG_JSON = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of several files
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
TOKENIZER = "tokenizer.json"  # of the `tokenizers` library
SENTENCEPIECE = "tokenizer.model"
