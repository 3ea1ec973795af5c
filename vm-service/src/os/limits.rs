//! The limits of this process (getrlimit(2)): soft ones are raised as far as they go, and what is too low even then is
//! said before a guest meets it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use vm_passthrough::readiness::FILES_PER_VECTOR;

/// Descriptors of everything but interrupts: KVM, disks, the console, the files of a device.
pub(crate) const REST: u64 = 256;

/// Raises the soft limits of open files and of locked memory to the hard ones, and that of locked memory altogether where this
/// process may (CAP_SYS_RESOURCE). What is checked by `explain` is then what `run` has.
pub(crate) fn raise() {
    if setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None }).is_ok() {
        tracing::debug!("the limit of locked memory was lifted");
    }
    for (resource, name) in [(Resource::Nofile, "open files"), (Resource::Memlock, "locked memory")] {
        let limit = getrlimit(resource);
        let Some(raised) = raised(limit) else { continue };
        match setrlimit(resource, raised) {
            Ok(()) => tracing::debug!("the limit of {name} was raised to {}", text(raised.current)),
            Err(error) => tracing::debug!(%error, "the limit of {name} stays at {}", text(limit.current)),
        }
    }
}

/// A limit with its soft value raised, if that can be.
fn raised(limit: Rlimit) -> Option<Rlimit> {
    (limit.current != limit.maximum).then_some(Rlimit { current: limit.maximum, maximum: limit.maximum })
}

fn text(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string())
}

/// Checks that the guest's drivers can use all `vectors` interrupt vectors of its devices. `explain` did, unless this user
/// may not read the devices' capabilities: then only VFIO tells them.
///
/// # Errors
/// When they would run out of file descriptors: what is needed, what there is, and what to do.
pub(crate) fn check_vectors(vectors: u64) -> Result<(), String> {
    check(vectors, getrlimit(Resource::Nofile).current)
}

fn check(vectors: u64, limit: Option<u64>) -> Result<(), String> {
    let needed = vectors.saturating_mul(FILES_PER_VECTOR).saturating_add(REST);
    match limit {
        Some(limit) if limit < needed => Err(format!(
            "the guest's devices have {vectors} interrupt vectors, which take up to {needed} open files, and this process \
             may have {limit}; raise the hard limit: \"* hard nofile {needed}\" in /etc/security/limits.conf, or \
             LimitNOFILE={needed} in the systemd unit"
        )),
        _ => Ok(()),
    }
}

/// Returns how many bytes this process may lock; `None` without a limit.
pub(crate) fn memlock() -> Option<u64> {
    // Without an answer VFIO tells it.
    let rights = rustix::thread::capabilities(None);
    let is_free = rights.is_ok_and(|rights| rights.effective.contains(CapabilitySet::IPC_LOCK));
    getrlimit(Resource::Memlock).current.filter(|_| !is_free)
}

/// Checks that devices can reach `memory` bytes of a process that may lock `limit`, of which none is locked yet. `explain` did for
/// the process that claims them, which may have rights that this one has given up.
///
/// # Errors
/// When it may lock less: what is needed, what there is, and what to do.
pub(crate) fn check_locked(memory: u64, limit: Option<u64>) -> Result<(), String> {
    match limit {
        Some(limit) if limit < memory => Err(format!(
            "devices lock all of the guest's RAM, {memory} bytes, and the process that the guest runs in may lock {limit}: it has a user \
             of its own, without the rights of the one that started it; raise the hard limit (LimitMEMLOCK=infinity in the systemd \
             unit, --ulimit memlock=-1 of a container), or give that one CAP_SYS_RESOURCE, which raises it"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_goes_up_to_the_hard_one() {
        let limit = |current, maximum| Rlimit { current, maximum };
        assert_eq!(raised(limit(Some(1024), Some(4096))), Some(limit(Some(4096), Some(4096))));
        assert_eq!(raised(limit(Some(1024), None)), Some(limit(None, None)));
        assert_eq!(raised(limit(Some(4096), Some(4096))), None);
        assert_eq!(raised(limit(None, None)), None);
    }

    #[test]
    fn a_limit_of_locked_memory_that_is_below_the_guests_ram_is_named() {
        for (memory, limit, is_refused) in [
            (1 << 30, Some(8 << 20), true),
            (1 << 30, Some((1 << 30) - 1), true),
            (1 << 30, Some(1 << 30), false),
            (1 << 30, None, false),
        ] {
            let checked = check_locked(memory, limit);
            assert_eq!(checked.is_err(), is_refused, "{memory} {limit:?}");
            let parts = [memory.to_string(), limit.unwrap_or(0).to_string(), "LimitMEMLOCK=infinity".into()];
            assert!(checked.err().iter().all(|said| parts.iter().all(|part| said.contains(part))));
        }
    }

    #[test]
    fn too_few_open_files_are_named() {
        fn check_that(vectors: u64, limit: Option<u64>, says: Option<&str>) {
            match (check(vectors, limit), says) {
                (Ok(()), None) => {}
                (Err(error), Some(part)) => assert!(error.contains(part), "{error}"),
                (result, _) => panic!("{vectors} {limit:?}: {result:?}"),
            }
        }
        check_that(0, Some(1024), None);
        check_that(384, Some(1024), None);
        check_that(385, Some(1024), Some("have 385 interrupt vectors, which take up to 1026 open files"));
        check_that(2048, Some(4096), Some("LimitNOFILE=4352"));
        check_that(2048, None, None);
        check_that(u64::MAX, Some(4096), Some("raise the hard limit"));
    }
}
