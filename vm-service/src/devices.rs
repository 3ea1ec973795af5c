//! The host's devices: its GPUs with their enclosures, its NPUs, the eGPUs that the operator knows, and claims that outlast a boot.

pub(crate) mod gpus;
pub(crate) mod health;
pub(crate) mod known_egpus;
pub(crate) mod npus;
pub(crate) mod saved;
