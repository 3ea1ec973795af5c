//! How long this program waits for what may hang, in one table, outer waits made of inner ones; that of devices is
//! [`vm_passthrough::deadlines`].

use std::time::Duration;

use vm_passthrough::deadlines::{ACCESS, longer_than, outlasts, sum};

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

/// A guest's access to its serial port: it holds a vCPU so long while nobody takes what it prints.
pub(crate) const SERIAL_HOLD: Duration = Duration::from_secs(1);

/// All vCPUs have left the guest, with what each of them accessed last: a reset of several functions ends with the one that is under
/// way.
pub(crate) const VCPU_STOP: Duration = longer_than(&[ACCESS, SERIAL_HOLD]);

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

/// A daemon that ended has let go of its lock, and so have the children that it made.
pub(crate) const DAEMON_LOCK: Duration = Duration::from_secs(2);

/// A client of the daemon completes a request's head, and then its body.
pub(crate) const API_CLIENT: Duration = Duration::from_secs(10);

/// The daemon answers what takes a guest no time.
pub(crate) const API_ANSWER: Duration = longer_than(&[CONTROL_ANSWER]);

/// A guest that was started runs, with its devices.
pub(crate) const GUEST_START: Duration = Duration::from_secs(120);

/// A guest whose power was cut has given everything back.
pub(crate) const GUEST_STOP: Duration = Duration::from_secs(60);

/// A process that was killed is gone, and so are its locks.
pub(crate) const GUEST_KILL: Duration = Duration::from_secs(5);

/// A guest that was told to end has ended, if need be because its process was killed.
pub(crate) const STOP_ANSWER: Duration = sum(&[CONTROL_ANSWER, GUEST_STOP, GUEST_KILL, GUEST_KILL]);

/// A device was given to a guest, or, past its own deadline, taken from it.
pub(crate) const GUEST_DEVICE: Duration = Duration::from_secs(120);

const _: () = {
    assert!(outlasts(DISK_STOP, STORAGE) && outlasts(LOADING_STOP, STORAGE) && outlasts(VHOST_STOP, VHOST));
    assert!(outlasts(ACCELERATOR_STOP, sum(&[WORKER_END, WORKER_INTERVAL])));
    assert!(outlasts(PING, sum(&[PING_PERIOD, WORKER_LOOK])));
    assert!(outlasts(VCPU_STOP, ACCESS) && outlasts(VCPU_STOP, SERIAL_HOLD));
};
