"""Training without a framework: parameters, optimiser and data position are arrays in one file.

model = la.layers.language_model(256, D=64, layers=2)
data = la.train.Tokens.open(["book.txt"])
run = la.train.Run.start(model.loss, la.train.AdamW(), seed=0)
la.train.fit(model.loss, run, data.batches(8, 256), steps=500, rate=la.train.cosine(3e-3, 500), save="run.safetensors")
la.train.picture("loss.png", run.losses)
"""

from .curve import in_a_line, picture
from .data import Tokens
from .flat import Flat
from .loop import fit
from .optimisers import AdamW, Muon
from .run import Run
from .safetensors import load, save
from .sampling import generate
from .schedules import constant, cosine
from .score import score

__all__ = ["AdamW", "Flat", "Muon", "Run", "Tokens", "constant", "cosine", "fit", "generate", "in_a_line", "load",
           "picture", "save", "score"]  # fmt: skip
