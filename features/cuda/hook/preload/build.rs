//! Makes the exported functions that only settle what is put off of `functions.txt`, and tables of all names.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=functions.txt");
    let table = fs::read_to_string("functions.txt")?;
    let (mut work, mut hooked, mut quiet, mut count) = (String::new(), Vec::new(), Vec::new(), 0);
    for line in table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["own", name] => hooked.push(*name),
            ["quiet", name] => quiet.push(*name),
            ["work", name, words] => {
                let words: usize = words.parse()?;
                let names: String = (0..words).map(|at| format!("a{at} ")).collect();
                writeln!(work, "    {count} {name} \"{name}\" ({names});")?;
                hooked.push(name);
                count += 1;
            }
            _ => return Err(format!("functions.txt: {line}").into()),
        }
    }
    hooked.sort_unstable();
    quiet.sort_unstable();
    let pairs: String =
        hooked.iter().map(|name| format!("    (\"{name}\", Code({name} as *const ())),\n")).collect();
    let text = format!(
        "const WORK: usize = {count};\nwork! {{\n{work}}}\n\
         /// The functions that are hooked, by name.\nstatic HOOKED: [(&str, Code); {}] = [\n{pairs}];\n\
         /// The names that are not, in order.\nstatic QUIET: [&str; {}] = {quiet:?};\n",
        hooked.len(),
        quiet.len()
    );
    fs::write(Path::new(&env::var("OUT_DIR")?).join("functions.rs"), text)?;
    Ok(())
}
