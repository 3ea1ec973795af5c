//! Enclosures of a simulated host.
