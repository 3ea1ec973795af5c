//! `docs/ir.md` says what the op table says.
//!
//! `VIR_UPDATE=1 cargo test -p vm-ir --test docs` writes its generated part again.

use std::fmt::Write;
use std::path::Path;
use vm_ir::op::{AttrKind, Group, TABLE};
use vm_ir::{Trust, text, validate};

const BEGIN: &str = "<!-- generated: ops -->\n";

fn generated() -> String {
    let mut out = String::from(BEGIN);
    for &group in Group::ALL {
        write!(out, "\n### {}\n\n| op | takes → gives | attributes | error | does |\n| --- | --- | --- | --- | --- |\n", group.title())
            .unwrap();
        for row in TABLE.iter().filter(|row| row.group == group) {
            let attrs: Vec<&str> = row.attrs.iter().map(|kind| kind.name()).collect();
            let error =
                row.error.map_or(String::new(), |e| format!("{}; 2^-{}", e.precise_ulps, e.fast_bits));
            let (shape, doc) = (row.shape.describe().replace('|', "\\|"), row.doc.trim().replace('|', "\\|"));
            writeln!(out, "| `{}` | {shape} | {} | {error} | {doc} |", row.mnemonic, attrs.join(", "))
                .unwrap();
        }
    }
    out.push_str("\n### Attributes\n\n| attribute | word | means |\n| --- | --- | --- |\n");
    for kind in AttrKind::ALL {
        for (i, (word, meaning)) in kind.words().iter().zip(kind.meanings()).enumerate() {
            let default = if kind.default() == Some(i as u8) { " (default)" } else { "" };
            writeln!(out, "| {} | `{word}`{default} | {} |", kind.name(), meaning.trim()).unwrap();
        }
    }
    out
}

#[test]
fn the_op_table_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ir.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let (head, tail) = document.split_once(BEGIN).expect("the generated part of docs/ir.md");
    let wanted = generated();
    if std::env::var_os("VIR_UPDATE").is_some() {
        std::fs::write(&path, format!("{head}{wanted}")).unwrap();
        return;
    }
    assert!(format!("{BEGIN}{tail}") == wanted, "docs/ir.md is behind the op table: run with VIR_UPDATE=1");
}

#[test]
fn the_examples_are_kernels() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let read = |name: &str| std::fs::read_to_string(docs.join(name)).unwrap();
    let document = read("ir.md") + &read("ir-tile.md");
    let mut checked = 0;
    for block in document.split("```text\n").skip(1) {
        let source = block.split("```").next().unwrap();
        if source.starts_with("vir ") {
            validate(text::parse(source).unwrap(), Trust::Guest).unwrap();
            checked += 1;
        }
    }
    assert_eq!(checked, 2);
}
