//! Compiles a kernel file:
//!
//! `cargo run -p vm-jit --example emit -- FILE.vir [ptx:sm_90a|amdgcn:gfx942|cpu] [guest|trusted]`
//!
//! The code goes to stdout (an object's is for `objdump -d`), where arguments go to stderr.

use std::error::Error;
use std::io::Write;
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
    let path = words.next().ok_or("usage: emit FILE.vir [TARGET] [guest|trusted]")?;
    let mut trust = Trust::Guest;
    let mut target: Target = "ptx:sm_90a".parse()?;
    for word in words {
        match word.as_str() {
            "guest" => trust = Trust::Guest,
            "trusted" => trust = Trust::Trusted,
            other => target = other.parse()?,
        }
    }
    if let Target::Ptx(options) = &mut target {
        options.source = Some(path.clone());
    }
    let module = validate(text::parse(&std::fs::read_to_string(&path)?)?, trust)?;
    let artifact = compile(&module, &target)?;
    for entry in &artifact.entries {
        eprintln!("{}: block {:?}, {:?}", entry.symbol, entry.block, entry.params);
    }
    std::io::stdout().write_all(&artifact.code)?;
    Ok(())
}
