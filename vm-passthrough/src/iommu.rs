//! IOMMU groups, the addresses that devices may not use, and who isolates whom.
