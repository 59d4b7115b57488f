"""File names of a Hugging Face model, in a module that loads no torch."""

CONFIG_JSON = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # index of several weight files
PICKLE = "pytorch_model.bin"  # read where there are no safetensors
PICKLE_INDEX = "pytorch_model.bin.index.json"
EXPORTED = "hugging_face"  # in a run folder: the model that the run ended with
