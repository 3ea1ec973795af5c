//! Errors of authorization and heat say what to do.

use super::*;
use crate::usb4::{self, Security};

/// The fix that follows the cause in an error.
fn fix(error: &str) -> &str {
    error.split_once("; ").map(|(_, fix)| fix).unwrap_or_default()
}

#[test]
fn each_refusal_of_the_policy_has_a_fix() {
    let id = "d2030000-00a0-751e-a3f4-c0e5ae7b0d30".parse().unwrap();
    let router = Box::new(usb4::scan(&Rig::new().host()).unwrap()[0].routers[1].clone());
    for refusal in [
        Refusal::Never,
        Refusal::NotAsked(id),
        Refusal::Unknown(id),
        Refusal::DmaUnprotected { domain: 0 },
        Refusal::TooSlow { has: 20_000, needs: 40_000, router },
        Refusal::NoPcie { domain: 0, security: Security::NoPcie },
        Refusal::NoIdentity,
        Refusal::TooWeak { has: 25, needs: 75 },
    ] {
        let text = refusal.to_string();
        let verbs = ["change", "run", "turn on", "use", "update", "try", "it runs on one lane"];
        assert!(verbs.iter().any(|verb| fix(&text).starts_with(verb)), "{text}");
    }
}

#[test]
fn a_write_that_the_linux_kernel_refuses_has_a_fix() {
    for (errno, expect) in [(libc::EACCES, "run this as root"), (libc::EIO, "see dmesg")] {
        let mut rig = Rig::new();
        assert_eq!(rig.poll(), State::Disconnected);
        rig.drivers.fail("sys/bus/thunderbolt/devices/0-1/authorized", "1", 1, errno);
        assert_eq!(rig.take(Event::Connect), State::Failed(Fault::NotAuthorised));
        let error = rig.manager.failure().unwrap();
        assert!(error.starts_with("cannot write 1 to ") && fix(error).starts_with(expect), "{error}");
    }
}

#[test]
fn one_that_is_too_hot_names_the_sensor_the_limit_and_what_to_do() {
    let mut rig = Rig::new();
    rig.connect();
    rig.warm(95_000);
    let state = rig.poll();
    assert_eq!(state, State::Failed(Fault::Overheated), "{:?}", rig.why);
    let why = rig.why.join("\n");
    for part in [
        "it is at 95 °C (read from ",
        "of 0000:",
        "the limit is 90 °C (`--hottest`)",
        "let it cool",
        "egpu connect",
    ] {
        assert!(why.contains(part), "{part}: {why}");
    }
}
