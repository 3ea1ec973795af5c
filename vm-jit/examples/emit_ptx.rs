//! Compiles a kernel file to PTX:
//!
//! `cargo run -p vm-jit --example emit_ptx -- FILE.vir [ptx:sm_90a] [guest|trusted]`
//!
//! The code goes to stdout, where arguments go to stderr.

use std::error::Error;
use std::process::ExitCode;
use vm_ir::{Trust, text, validate};
use vm_jit::{Target, compile};

fn main() -> ExitCode {
    match emit() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn emit() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let path = words.next().ok_or("usage: emit_ptx FILE.vir [ptx:ARCHITECTURE] [guest|trusted]")?;
    let mut trust = Trust::Guest;
    let mut target: Target = "ptx:sm_90a".parse()?;
    for word in words {
        match word.as_str() {
            "guest" => trust = Trust::Guest,
            "trusted" => trust = Trust::Trusted,
            other => target = other.parse()?,
        }
    }
    let Target::Ptx(options) = &mut target;
    options.source = Some(path.clone());
    let module = validate(text::parse(&std::fs::read_to_string(&path)?)?, trust)?;
    let artifact = compile(&module, &target)?;
    for entry in &artifact.entries {
        eprintln!("{}: block {:?}, {:?}", entry.symbol, entry.block, entry.params);
    }
    print!("{}", artifact.text().unwrap_or_default());
    Ok(())
}
