"""Settings of every test: one thread per process, no accelerator, no network."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", OMP_NUM_THREADS="1")

import torch

torch.set_num_threads(1)
