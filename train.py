"""Train a language model: `python train.py --help` explains the choices. The program is
app/cli/train.py.
"""

from app.cli.commands import train

if __name__ == "__main__":
    train()
