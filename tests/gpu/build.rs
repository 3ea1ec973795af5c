//! Puts the kernels of vm-ir's filetests into the program, so that it runs on a machine without the repository.

use std::fmt::Write;
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let filetests = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("../../vm-ir/filetests");
    let mut files = Vec::new();
    for folder in ["run", "tile"] {
        let folder = filetests.join(folder).canonicalize()?;
        println!("cargo::rerun-if-changed={}", folder.display());
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "vir") {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut code = String::from("&[\n");
    for path in files {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        writeln!(code, "    ({name:?}, include_str!({:?})),", path.display().to_string())?;
    }
    code.push_str("]\n");
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("filetests.rs"), code)?;
    Ok(())
}
