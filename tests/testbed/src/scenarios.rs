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
    claim_kill9::SCENARIO,
    claim_signal::SCENARIO,
    daemon_kill9::SCENARIO,
    two_guests::SCENARIO,
    rack::SCENARIO,
    daemon::SCENARIO,
    hostile_accel::SCENARIO,
    linux_accel::SCENARIO,
    linux_cuda::SCENARIO,
    linux_cupy::SCENARIO,
    linux_python::SCENARIO,
    hot_attach::SCENARIO,
    hot_attach_cycles::SCENARIO,
    unbind_stuck::SCENARIO,
    linux_igb::SCENARIO,
    linux_e1000e::SCENARIO,
    device_errors::SCENARIO,
    linux_ati::SCENARIO,
    linux_big_bars::SCENARIO,
    linux_big_bars::HUGE,
    linux_net::SCENARIO,
    host_wants_back::SCENARIO,
    surprise_removal::SCENARIO,
    linux_storage::SCENARIO,
    numa::SCENARIO,
    egpu::HOTPLUG,
    egpu::RECONNECT,
    egpu::SURPRISE,
    linux_nvme::SCENARIO,
    device_kinds::SCENARIO,
    group_not_viable::SCENARIO,
    dma_buf::SCENARIO,
    dma_limits::SCENARIO,
    silent_device::SCENARIO,
    scan_explain::SCENARIO,
    systemd::SCENARIO,
    vmm_killed::SCENARIO,
    bare_edu::SCENARIO,
    bad_ledger::SCENARIO,
    own_vmm::SCENARIO,
    joint_reset::SCENARIO,
    peer_to_peer::SCENARIO,
    vf_token::SCENARIO,
    bare_accel::SCENARIO,
    host_ready::SCENARIO,
    host_wants_back::BY_ACPI,
];

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
