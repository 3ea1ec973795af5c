//! A hostile ledger, for fuzzing: bytes that lie in a record's place.

use super::ClaimedFunction;
use super::journal::{Unread, ended, line_of, parse, salvage};

/// Reads arbitrary bytes as a record of the ledger, as they are and then with checksums that fit, which chance would hardly
/// find. What is read must be what its own text says, and name drivers only that lead to no other path; the rest must say why
/// it is not read.
#[doc(hidden)]
pub fn fuzz_record(data: &[u8]) {
    check(data);
    let text: String = String::from_utf8_lossy(data).lines().map(line_of).collect();
    check(text.as_bytes());
    check(ended(text).as_bytes());
}

fn check(bytes: &[u8]) {
    match parse(bytes) {
        Ok(entry) => {
            assert_eq!(parse(entry.text().as_bytes()).as_ref(), Ok(&entry));
            are_harmless(&entry.functions);
        }
        Err(Unread::Damaged(what)) => assert!(!what.is_empty()),
        Err(Unread::Newer(version)) => assert!(version > 2),
    }
    are_harmless(&salvage(bytes));
}

/// What is undone of these functions is written below their drivers' and their own folders alone, once each.
fn are_harmless(functions: &[ClaimedFunction]) {
    for (number, function) in functions.iter().enumerate() {
        for name in [&function.driver, &function.driver_override].into_iter().flatten() {
            assert!(
                !matches!(name.as_str(), "" | "." | "..") && !name.contains(['/', '\0', '\n']),
                "{name:?}"
            );
        }
        let methods = function.resets.as_deref().unwrap_or("flr");
        assert!(
            methods.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_ ".contains(&byte)),
            "{methods:?}"
        );
        assert!(functions[..number].iter().all(|other| other.address != function.address), "{function:?}");
    }
}
