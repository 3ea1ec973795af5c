//! How long this program waits for what may hang, in one table, outer waits made of inner ones; that of devices is
//! [`vm_passthrough::deadlines`].

use std::time::Duration;

use vm_passthrough::deadlines::{
    ACCESS, DRIVERS, FUNCTIONS, LEDGER, PEERS, RESET, longer_than, outlasts, sum,
};

use crate::config::{GuestConfig, MAX_DEVICES};

/// A guest whose power button is pressed has powered itself off, unless the operator says another time.
pub(crate) const SHUTDOWN: Duration = Duration::from_secs(30);

/// A time as the command line gives it.
///
/// # Errors
/// What to write instead.
pub(crate) fn seconds(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.filter(|time| *time <= MAX_REQUEST).ok_or("write seconds, as in 30 or 2.5, at most 86400")
}

/// Longest deadline that a request may set.
pub(crate) const MAX_REQUEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Deserializes the deadline of a request, in milliseconds.
///
/// # Errors
/// When it is no number, or longer than [`MAX_REQUEST`].
pub(crate) fn milliseconds<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let milliseconds: u64 = serde::Deserialize::deserialize(deserializer)?;
    match Duration::from_millis(milliseconds) <= MAX_REQUEST {
        true => Ok(milliseconds),
        false => Err(serde::de::Error::custom("a deadline is at most 86400000 ms, which is a day")),
    }
}

/// Storage answers: a piece of a request, what was written is safe, a piece of a file.
pub(crate) const STORAGE: Duration = Duration::from_secs(5);

/// vhost stops.
pub(crate) const VHOST: Duration = Duration::from_secs(5);

/// A disk has stopped.
pub(crate) const DISK_STOP: Duration = longer_than(&[STORAGE]);

/// A device that vhost serves has stopped.
pub(crate) const VHOST_STOP: Duration = longer_than(&[VHOST]);

/// Loading the guest's program has stopped.
pub(crate) const LOADING_STOP: Duration = longer_than(&[STORAGE]);

/// A worker has opened its accelerator: a GPU that nobody uses takes seconds to wake. Who is to end does not wait for it.
pub(crate) const WORKER_OPEN: Duration = Duration::from_secs(60);

/// A killed worker is gone: a GPU's driver tears its context down meanwhile.
pub(crate) const WORKER_END: Duration = Duration::from_secs(30);

/// A shared accelerator has stopped, with its worker gone.
pub(crate) const ACCELERATOR_STOP: Duration = longer_than(&[WORKER_END]);

/// How long the interval is between two workers of a device: a guest that resets its device for ever costs the host no more.
pub(crate) const WORKER_INTERVAL: Duration = Duration::from_millis(250);

/// How often a worker looks at its own deadlines, and hears the VMM.
pub(crate) const WORKER_LOOK: Duration = Duration::from_millis(500);

/// How often a worker is asked whether it is there.
pub(crate) const PING_PERIOD: Duration = Duration::from_secs(2);

/// A worker answers that it is there.
pub(crate) const PING: Duration = Duration::from_secs(20);

/// Another process writes a batch of records to the log file.
pub(crate) const LOG_FILE_LOCK: Duration = Duration::from_secs(2);

/// The last records are in the log file.
pub(crate) const LOG_FILE_FLUSH: Duration = longer_than(&[LOG_FILE_LOCK]);

/// A guest's access to its serial port: it holds a vCPU so long while nobody takes what it prints.
pub(crate) const SERIAL_HOLD: Duration = Duration::from_secs(1);

/// All vCPUs have left the guest, with what each of them accessed last: a reset of several functions ends with the one that is under
/// way.
pub(crate) const VCPU_STOP: Duration = longer_than(&[ACCESS, SERIAL_HOLD]);

/// The state of a device is read: who only watches it comes back.
pub(crate) const DEVICE_HEALTH: Duration = Duration::from_secs(2);

/// A device is closed by all that have come to it before it was unplugged: vCPUs, and what watches it.
pub(crate) const CLOSE: Duration = longer_than(&[ACCESS]);

/// A guest lets go of a device that the host wants back: Linux gives its users 5 s to change their minds, and then has its driver
/// let go.
pub(crate) const HOST_WAITS: Duration = Duration::from_secs(8);

/// A client of a guest's control socket completes the line that it has begun, and reads what it is sent.
pub(crate) const CONTROL_CLIENT: Duration = Duration::from_secs(10);

/// Clients read the last that a guest that ends has to tell.
pub(crate) const CONTROL_END: Duration = Duration::from_millis(500);

/// A guest answers what takes no time.
pub(crate) const CONTROL_ANSWER: Duration = Duration::from_secs(5);

/// A process that holds a lock for a moment, or has just ended, has let go of it, and so have the children that it made.
pub(crate) const FILE_LOCK: Duration = Duration::from_secs(2);

/// How often a request that waits for a guest checks that its client is still connected.
pub(crate) const CALLER_CHECK: Duration = Duration::from_secs(1);

/// A client of the daemon completes a request's head, and then its body, and reads some of what is sent to it.
pub(crate) const API_CLIENT: Duration = Duration::from_secs(10);

/// The daemon answers what takes a guest no time.
pub(crate) const API_ANSWER: Duration = longer_than(&[CONTROL_ANSWER]);

/// A guest's VMM has made its machine. Its accelerators wake meanwhile, one after the other, each in [`WORKER_OPEN`].
pub(crate) const VMM_MADE: Duration = Duration::from_secs(60);

/// A guest's VMM has given up making its machine, as the guest is to end: nobody loses anything by its being killed then. It
/// says first what it waited for.
pub(crate) const VMM_GIVES_UP: Duration = longer_than(&[LOADING_STOP]);

/// How often a VMM is asked whether it is there, and how long it may take to answer.
pub(crate) const VMM_PING: Duration = Duration::from_secs(5);

/// A VMM has detached a device: accesses to it end, it is taken from the guest, and it is reset.
const VMM_DETACH: Duration = sum(&[ACCESS, ACCESS, PEERS, RESET]);

/// A VMM has reset its machine: its vCPUs leave the guest, and its devices stop and are reset, one after the other.
const VMM_RESET: Duration = sum(&[
    VCPU_STOP,
    DISK_STOP,
    VHOST_STOP,
    ACCELERATOR_STOP,
    sum(&[sum(&[PEERS, PEERS, RESET]); MAX_DEVICES]),
]);

/// A guest's VMM has carried out an order other than to attach a device, or has reset the guest.
pub(crate) const VMM_ORDER: Duration = longer_than(&[VMM_DETACH, VMM_RESET]);

/// A guest's VMM has ended the guest. One that takes longer, for a device's reset say, is killed: a guest loses no more by that than by
/// being stopped.
pub(crate) const VMM_STOP: Duration =
    longer_than(&[LOADING_STOP, DISK_STOP, VHOST_STOP, ACCELERATOR_STOP, CONSOLE_END]);

/// A guest's VMM that was killed is gone: the Linux kernel has let go of its memory, and of its devices.
pub(crate) const VMM_END: Duration = Duration::from_secs(60);

/// A guest's VMM has attached a device: the Linux kernel clears and pins all of the guest's RAM, at about a second a GiB.
pub(crate) const VMM_ATTACH: Duration = Duration::from_secs(3600);

/// The last of a guest's console output is written.
pub(crate) const CONSOLE_END: Duration = Duration::from_secs(5);

/// A guest that was started runs, with its devices: its machine is made, its program is loaded, each device is claimed, opened and
/// attached, and with the first of them its RAM is pinned.
pub(crate) fn guest_start(guest: &GuestConfig) -> Duration {
    let devices = GUEST_ATTACH.saturating_mul(guest.devices.len() as u32);
    let workers = WORKER_OPEN.saturating_mul(guest.accelerators.len() as u32);
    sum(&[VMM_MADE, workers, GUEST_LOADED, devices])
}

/// A guest's program is loaded, with all that the storage takes.
const GUEST_LOADED: Duration = Duration::from_secs(120);

/// A guest was reset, or else its VMM is gone.
pub(crate) const GUEST_RESET: Duration = sum(&[CONTROL_ANSWER, VMM_ORDER, VMM_END]);

/// A claim was released: the VMM and the watch have closed its functions, these and the ledger are unlocked, and drivers are
/// bound.
const RELEASE: Duration = sum(&[CLOSE, DRIVERS, LEDGER, DRIVERS]);

/// A guest whose power was cut, and which has this many devices, has released everything.
pub(crate) const fn guest_stop(devices: usize) -> Duration {
    let released = if devices < MAX_DEVICES { devices } else { MAX_DEVICES };
    sum(&[VMM_STOP, VMM_END, RELEASE.saturating_mul(released as u32)])
}

/// A process that was killed is gone, and so are its locks.
pub(crate) const GUEST_KILL: Duration = Duration::from_secs(5);

/// A guest that was asked to end has ended, if need be because its process was killed.
pub(crate) const STOP_ANSWER: Duration =
    sum(&[CONTROL_ANSWER, CONTROL_ANSWER, guest_stop(MAX_DEVICES), GUEST_KILL, GUEST_KILL]);

/// A device was attached to a guest: it is claimed, opened and attached, or else the guest's VMM is gone.
pub(crate) const GUEST_ATTACH: Duration = sum(&[FUNCTIONS, DRIVERS, VMM_ORDER, VMM_ATTACH, VMM_END]);

/// A device was detached from a guest, past the deadline of the guest itself, or else the guest's VMM is gone.
pub(crate) const GUEST_DETACH: Duration = sum(&[VMM_ORDER, VMM_END, RELEASE]);

const _: () = {
    assert!(outlasts(DISK_STOP, STORAGE) && outlasts(LOADING_STOP, STORAGE) && outlasts(VHOST_STOP, VHOST));
    assert!(outlasts(ACCELERATOR_STOP, sum(&[WORKER_END, WORKER_INTERVAL])));
    assert!(outlasts(PING, sum(&[PING_PERIOD, WORKER_LOOK])));
    assert!(outlasts(VCPU_STOP, ACCESS) && outlasts(VCPU_STOP, SERIAL_HOLD));
    assert!(
        outlasts(CLOSE, ACCESS)
            && outlasts(RELEASE, sum(&[CLOSE, LEDGER]))
            && outlasts(API_ANSWER, CONTROL_ANSWER)
    );
    assert!(
        outlasts(VMM_ORDER, VMM_DETACH) && outlasts(VMM_ORDER, VMM_RESET) && outlasts(VMM_RESET, VCPU_STOP)
    );
    assert!(
        outlasts(VMM_STOP, LOADING_STOP) && outlasts(VMM_STOP, DISK_STOP) && outlasts(VMM_STOP, VHOST_STOP)
    );
    assert!(outlasts(VMM_STOP, ACCELERATOR_STOP) && outlasts(VMM_STOP, CONSOLE_END));
    assert!(outlasts(VMM_GIVES_UP, LOADING_STOP) && outlasts(LOG_FILE_FLUSH, LOG_FILE_LOCK));
    assert!(outlasts(GUEST_ATTACH, sum(&[FUNCTIONS, VMM_ATTACH])) && outlasts(GUEST_DETACH, VMM_ORDER));
    assert!(outlasts(GUEST_RESET, sum(&[VMM_ORDER, VMM_END])));
    let mut devices = 0;
    while devices <= MAX_DEVICES {
        assert!(outlasts(guest_stop(devices), VMM_STOP) && outlasts(STOP_ANSWER, guest_stop(devices)));
        devices += 1;
    }
    assert!(outlasts(guest_stop(MAX_DEVICES), sum(&[DRIVERS; MAX_DEVICES])));
};
