//! `docs/ptx.md` has the table of instructions.
//!
//! `VIR_UPDATE=1 cargo test -p vm-ptx --test docs` writes it again.

use std::fmt::Write;
use std::path::Path;

const BEGIN: &str = "<!-- generated: instructions -->\n";

#[test]
fn the_table_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/ptx.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let (head, tail) = document.split_once(BEGIN).expect("the generated part of docs/ptx.md");
    let mut wanted = String::from("\n| instructions | of these |\n| --- | --- |\n");
    for (codes, forms) in vm_ptx::supported() {
        let codes: Vec<String> = codes.iter().map(|code| format!("`{code}`")).collect();
        writeln!(wanted, "| {} | {forms} |", codes.join(", ")).unwrap();
    }
    if std::env::var_os("VIR_UPDATE").is_some() {
        std::fs::write(&path, format!("{head}{BEGIN}{wanted}")).unwrap();
        return;
    }
    assert!(tail == wanted, "docs/ptx.md is behind the table: run with VIR_UPDATE=1");
}
