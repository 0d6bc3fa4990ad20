"""What is trained, hence what is shipped.

full          all parameters. Pick it when gradient and two moments of every weight fit; the strongest, and the most bytes a
              publish.
lora          two thin factors per layer; engines hold the frozen model themselves, add the product on the fly, and are shipped
              the factors alone: 1.8 % of the bytes at rank 8 on SmolLM2. Pick it for large models, slow links, little memory.
lora_merged   the same training, but the product is added to the weights that are shipped: for engines that know no adapters.
              As many bytes as ``full``; decoding costs nothing extra.

base          the contract, and what a layer's adapter looks like to an engine
checks        what a config may ask for, from files alone
injection     peft puts adapters into a model; everything that needs peft to do so is there
directory     the files of a peft directory: written for checkpoints and engines, read for starts and resumes
"""
