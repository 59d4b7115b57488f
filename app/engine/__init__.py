"""Run-time side of training: process groups, executor, checkpoints, reports, trainer."""
