"""The training worker. Everything here but base, packing, schedule and metrics needs torch.

core        TorchLearner: one optimizer step per batch, weights, save and load
gradient    the gradient of a step, micro-batch by micro-batch
packing     rows to micro-batches in which every distinct prefix is forwarded once
policy      the one torch module: a micro-batch to log-probs of its trained tokens
model       the Hugging Face model inside it        attention   over a prefix tree      probes      how a model may be called
head        the output layer, only where a trained token needs it
balance     load-balancing loss of a mixture of experts
provenance  recorded supports and experts, aligned with what is forwarded               support     masks of supports
schedule    learning rate       metrics     the report of a step        checkpoint  files that training resumes from
weights     the weights alone, in a learner's place, for an evaluation
"""
