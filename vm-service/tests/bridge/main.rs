//! CUDA programs through `bridge serve`, each with its confined worker.

mod deadline;
mod life;
mod limits;
mod nvml;
mod nvml_host;
mod operate;
mod process;
mod serve;
mod share;
mod slice;
