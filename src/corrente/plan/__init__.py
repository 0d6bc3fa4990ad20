"""What a run would take, before it is paid for: the production pipeline under the virtual clock, with a cost model.

    models.py      shapes of models: parameters, keys and values, FLOPs
    devices.py     what devices can do
    lengths.py     how long completions are
    setting.py     one question: model, devices, batch, lengths, how far generation may run ahead
    costs.py       seconds and bytes of each part, by published formulas
    predict.py     the pipeline on virtual parts with these costs, and what comes out
    search.py      the best split of the devices, within limits
    tables.py      answers as text

Imports no torch.
"""
