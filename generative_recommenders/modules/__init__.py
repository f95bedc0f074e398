"""nn.Modules: the STU layer and stack, the transducer and the DLRM ranker around them."""
