//! What the program tells on standard error.

use std::process::Command;

/// An error quotes what it is about, however long that is.
#[test]
fn a_long_error_is_cut_and_not_lost() {
    let dir = tempfile::tempdir().expect("a folder");
    for digits in [10, 1 << 10, 1 << 20] {
        let number = "9".repeat(digits);
        let text = format!("vir 1\nkernel @k() at 0x0 block(1) {{\n%a = const {number} : i32\n}}\n");
        std::fs::write(dir.path().join("long.vir"), text).expect("written");
        let output = Command::new(env!("CARGO_BIN_EXE_vm-service"))
            .args(["compile", "long.vir", "--target", "ptx:sm_90a"])
            .current_dir(dir.path())
            .output()
            .expect("started");
        let err = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{digits}");
        let start = "error: long.vir: line 3:12, kernel @k: 9999";
        let end = if digits > 1 << 16 { "bytes are left out)\n" } else { "^^^\n" };
        assert!(err.starts_with(start) && err.ends_with(end), "{digits}: {} bytes", err.len());
        assert_eq!(err.contains("9 is no i32\n  3 | %a = const 999"), digits <= 1 << 16, "{digits}");
        assert!(err.len() < 1 << 16, "{digits}: {} bytes", err.len());
    }
}
