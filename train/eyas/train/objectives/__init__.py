"""Training maths by the name of the draft; dispatch is this literal."""

from eyas.train.objectives.eagle3 import eagle3_step

OBJECTIVES = {"eagle3": eagle3_step, "eagle3.1": eagle3_step}
"""Name -> function of (draft, batch, supervision, config, counts) that returns a StepOutput."""
