//! A simulated host: a sysfs tree, drivers that bind and unbind, and faults on demand.
