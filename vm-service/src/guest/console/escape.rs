//! The keys that are for the VMM and not for the guest: Ctrl-A and a letter, as in QEMU.
//!
//! ```text
//!            ┌── any key ──▶ guest ──┐
//!            ▼                       │
//!         Plain ◀────────────────────┘
//!            │ Ctrl-A
//!            ▼
//!         Escaped ── x ─────▶ quit
//!            │    ── p ─────▶ power button
//!            │    ── h ─────▶ help
//!            │    ── Ctrl-A ▶ Ctrl-A to the guest
//!            └─── another key ▶ dropped
//! ```

/// Ctrl-A as a terminal sends it.
const CTRL_A: u8 = 0x01;

/// What keys mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// They are for the guest.
    Guest(Vec<u8>),
    /// The operator wants to see the keys that are not for the guest.
    Help,
    /// The operator presses the guest's power button.
    PowerButton,
    /// The operator wants to stop the guest.
    Quit,
}

/// Sorts what is typed: for the guest, or for the VMM.
#[derive(Clone, Copy, Debug, Default)]
pub struct Escape {
    escaped: bool,
}

impl Escape {
    /// What [`Input::Help`] asks for.
    pub const HELP: &'static str = "Ctrl-A x stops the guest, Ctrl-A p asks it to power off, Ctrl-A Ctrl-A sends Ctrl-A, Ctrl-A h shows this";

    /// Sorts the next keys. Nothing is meant by keys after [`Input::Quit`].
    pub fn push(&mut self, keys: &[u8]) -> Vec<Input> {
        let mut inputs = Vec::new();
        for &key in keys {
            match (std::mem::take(&mut self.escaped), key) {
                (false, CTRL_A) => self.escaped = true,
                (false, key) | (true, key @ CTRL_A) => match inputs.last_mut() {
                    Some(Input::Guest(bytes)) => bytes.push(key),
                    _ => inputs.push(Input::Guest(vec![key])),
                },
                (true, b'x' | b'X') => {
                    inputs.push(Input::Quit);
                    break;
                }
                (true, b'p' | b'P') => inputs.push(Input::PowerButton),
                (true, b'h' | b'H' | b'?') => inputs.push(Input::Help),
                (true, _) => {}
            }
        }
        inputs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_keys() {
        fn check(reads: &[&[u8]], expect: &[Input]) {
            let mut escape = Escape::default();
            let got: Vec<Input> = reads.iter().flat_map(|keys| escape.push(keys)).collect();
            assert_eq!(got, expect, "{reads:?}");
        }
        let guest = |bytes: &[u8]| Input::Guest(bytes.to_vec());
        check(&[b"ls\r"], &[guest(b"ls\r")]);
        check(&[b"\x03"], &[guest(b"\x03")]);
        check(&[b"a\x01xb"], &[guest(b"a"), Input::Quit]);
        check(&[b"\x01", b"x"], &[Input::Quit]);
        check(&[b"\x01X"], &[Input::Quit]);
        check(&[b"a\x01\x01b"], &[guest(b"a\x01b")]);
        check(&[b"\x01", b"\x01", b"x"], &[guest(b"\x01"), guest(b"x")]);
        check(&[b"a\x01hb"], &[guest(b"a"), Input::Help, guest(b"b")]);
        check(&[b"a\x01pb"], &[guest(b"a"), Input::PowerButton, guest(b"b")]);
        check(&[b"a\x01zb"], &[guest(b"ab")]);
        check(&[b""], &[]);
    }
}
