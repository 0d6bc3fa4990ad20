"""The training worker. Everything here but base, packing, schedule and metrics needs torch.

core        TorchLearner: one optimizer step per batch, weights, save and load
packing     rows to micro-batches in which every distinct prefix is forwarded once
model       an unmodified Hugging Face model as a function from a micro-batch to log-probs
head        the output layer, only where a trained token needs it
schedule    learning rate      metrics     what a step reports      checkpoint  what a step can be resumed from
"""
