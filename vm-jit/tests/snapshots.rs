//! The PTX of the files under `filetests/ptx`.
//!
//! ```text
//! ; ptx: sm_90a guest
//! ;   has setp.lt.u64
//! ;   has @%p0 ld.global
//! ;   lacks selp
//! ```
//!
//! `; ptx: ARCHITECTURE TRUST` compiles the file; TRUST is `guest` or `trusted`. The `has` behind it must be
//! found in the code in this order, each in a line of its own; no `lacks` may be found. `; reject: ARCHITECTURE
//! TEXT` wants a rejection that says TEXT.

use std::path::Path;
use vm_ir::{Trust, text, validate};
use vm_jit::{Target, compile};

fn check(text: &str) -> Result<usize, String> {
    let module = text::parse(text).map_err(|e| e.to_string())?;
    let mut cases = 0;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("; reject: ") {
            let (arch, wanted) = rest.split_once(' ').ok_or("reject: ARCHITECTURE TEXT")?;
            let target: Target = format!("ptx:{arch}").parse().map_err(|e| format!("{e}"))?;
            let valid = validate(module.clone(), Trust::Guest).map_err(|e| e.to_string())?;
            match compile(&valid, &target) {
                Err(rejected) if rejected.to_string().contains(wanted) => cases += 1,
                Err(rejected) => return Err(format!("rejected with: {rejected}")),
                Ok(_) => return Err(format!("{arch} does not reject it")),
            }
            continue;
        }
        let Some(head) = line.strip_prefix("; ptx: ") else { continue };
        let (arch, trust) = head.split_once(' ').ok_or("ptx: ARCHITECTURE TRUST")?;
        let trust = if trust == "trusted" { Trust::Trusted } else { Trust::Guest };
        let target: Target = format!("ptx:{arch}").parse().map_err(|e| format!("{e}"))?;
        let valid = validate(module.clone(), trust).map_err(|e| e.to_string())?;
        let artifact = compile(&valid, &target).map_err(|e| e.to_string())?;
        let code = artifact.text().ok_or("no text")?;
        let mut rest = code.lines();
        while let Some(line) = lines.peek() {
            if let Some(wanted) = line.strip_prefix(";   has ") {
                if !rest.any(|l| l.contains(wanted)) {
                    return Err(format!("{head}: no `{wanted}` (in this place) in\n{code}"));
                }
            } else if let Some(unwanted) = line.strip_prefix(";   lacks ") {
                if code.contains(unwanted) {
                    return Err(format!("{head}: `{unwanted}` in\n{code}"));
                }
            } else {
                break;
            }
            lines.next();
        }
        cases += 1;
    }
    Ok(cases)
}

#[test]
fn ptx() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests/ptx");
    let mut failures = String::new();
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        files += 1;
        match check(&text) {
            Ok(0) => failures += &format!("{} checks nothing\n", path.display()),
            Ok(_) => {}
            Err(error) => failures += &format!("{}: {error}\n", path.display()),
        }
    }
    assert!(files >= 8, "{files}");
    assert!(failures.is_empty(), "{failures}");
}
