//! The scenarios, one file each.

mod bad_ledger;
mod bare_accel;
mod bare_edu;
mod bench;
mod bench_hot_attach;
mod bench_intx;
mod bench_map;
mod bench_net;
mod bench_python;
mod claim_kill9;
mod claim_signal;
mod daemon;
mod daemon_kill9;
mod device_errors;
mod device_kinds;
mod device_state;
mod dma_buf;
mod dma_limits;
mod e1000;
mod egpu;
mod group_not_viable;
mod host_ready;
mod host_wants_back;
mod hostile_accel;
mod hot_attach;
mod hot_attach_cycles;
mod joint_reset;
mod linux_accel;
mod linux_ati;
mod linux_big_bars;
mod linux_cuda;
mod linux_cupy;
mod linux_e1000e;
mod linux_igb;
mod linux_net;
mod linux_nvme;
mod linux_python;
mod linux_storage;
mod numa;
mod own_vmm;
mod peer_to_peer;
mod rack;
mod scan_explain;
mod silent_device;
mod surprise_removal;
mod systemd;
mod topology;
mod two_guests;
mod unbind_stuck;
mod vf_token;
mod vmm_killed;

use crate::scenario::Scenario;

/// Those that `cargo testbed` runs when none is named, the longest first, so that none is left to run alone.
pub const ALL: &[Scenario] = &[
    linux_cuda::SCENARIO,
    linux_cupy::SCENARIO,
    claim_kill9::SCENARIO,
    systemd::SCENARIO,
    rack::SCENARIO,
    hot_attach::SCENARIO,
    surprise_removal::SCENARIO,
    linux_igb::SCENARIO,
    daemon_kill9::SCENARIO,
    egpu::RECONNECT,
    numa::SCENARIO,
    daemon::SCENARIO,
    linux_ati::SCENARIO,
    linux_python::SCENARIO,
    silent_device::SCENARIO,
    egpu::HOTPLUG,
    linux_accel::SCENARIO,
    dma_limits::SCENARIO,
    linux_net::SCENARIO,
    linux_storage::SCENARIO,
    hostile_accel::SCENARIO,
    linux_e1000e::SCENARIO,
    linux_nvme::SCENARIO,
    device_errors::SCENARIO,
    device_kinds::SCENARIO,
    hot_attach_cycles::SCENARIO,
    host_wants_back::SCENARIO,
    two_guests::SCENARIO,
    claim_signal::SCENARIO,
    vmm_killed::SCENARIO,
    egpu::SURPRISE,
    joint_reset::SCENARIO,
    linux_big_bars::HUGE,
    linux_big_bars::SCENARIO,
    peer_to_peer::SCENARIO,
    bare_edu::SCENARIO,
    vf_token::SCENARIO,
    group_not_viable::SCENARIO,
    scan_explain::SCENARIO,
    bare_accel::SCENARIO,
    bad_ledger::SCENARIO,
    host_wants_back::BY_ACPI,
    unbind_stuck::SCENARIO,
    dma_buf::SCENARIO,
    own_vmm::SCENARIO,
    host_ready::SCENARIO,
];

/// The scenario that every partial sweep includes: a guest uses a device of the host and gives it back.
pub const ALWAYS: &str = linux_nvme::SCENARIO.name;

/// Those that measure, run only when named.
pub const BENCHMARKS: &[Scenario] = &[
    bench::SCENARIO,
    bench_hot_attach::SCENARIO,
    bench_intx::SCENARIO,
    bench_map::SCENARIO,
    bench_net::SCENARIO,
    bench_python::SCENARIO,
    rack::BENCHMARK,
];
