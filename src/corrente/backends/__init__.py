"""How one optimizer step is executed.

single   one device, one process: AdamW over all parameters. Pick it when model, gradient and two moments fit on the device:
         16 bytes a parameter in float32.
"""
