//! Every reason why a function cannot be passed through, each with its remedy.
