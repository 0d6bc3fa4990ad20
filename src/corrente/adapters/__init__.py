"""The parameters that are trained, hence those that are shipped.

full          all parameters. Pick it when gradient and two moments of every weight fit; the strongest, and the most bytes a
              publish.
lora          two thin factors per layer; engines hold the frozen model themselves and add the product in each forward pass;
              the factors alone are shipped: 1.8 % of the bytes at rank 8 on SmolLM2. Pick it for large models, slow links, little
              memory.
lora_merged   the same training, but the product is added to the weights that are shipped: for engines that know no adapters.
              As many bytes as ``full``; decoding costs nothing extra.

base          the contract, and what a layer's adapter looks like to an engine
checks        tests of a config, from files alone
injection     adding adapters to a model; all that needs peft for it is there
directory     the files of a peft directory: written for checkpoints and engines, read for starts and resumes
"""

from __future__ import annotations

from collections.abc import Mapping

KINDS: Mapping[str, str] = {
    "full": "corrente.adapters.full:FullAdapters",
    "lora": "corrente.adapters.lora:LoraAdapters",
    "lora_merged": "corrente.adapters.merged:MergedAdapters",
}
"""``adapters.kind`` -> the class that implements base.Adapters."""
