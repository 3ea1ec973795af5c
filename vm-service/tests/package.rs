//! What a package brings beside the program: man pages, completions and systemd units.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::{CommandFactory as _, Parser as _};
use vm_service::cli::Cli;

/// The units that start something, each with its text.
fn services() -> Vec<(PathBuf, String)> {
    units()
        .into_iter()
        .filter(|(path, _)| path.extension().is_some_and(|extension| extension == "service"))
        .collect()
}

/// The units, each with its text.
fn units() -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("package");
    let files = |folder| fs::read_dir(folder).expect("the package").map(|file| file.expect("a file").path());
    let units = files(folder.clone()).chain(files(folder.join("enabled"))).filter(|path| {
        path.extension().is_some_and(|extension| extension == "service" || extension == "socket")
    });
    units.map(|path| (path.clone(), fs::read_to_string(path).expect("a unit"))).collect()
}

/// Whether a program is there; if not, says that the test is skipped.
fn has(program: &str) -> bool {
    let there = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if there.is_err() {
        println!("skipped: there is no {program}");
    }
    there.is_ok()
}

#[test]
fn every_command_has_a_man_page() {
    let folder = tempfile::tempdir().expect("a folder");
    clap_mangen::generate_to(Cli::command(), &folder).expect("man pages");
    for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
        let page = folder.path().join(format!("vm-service-{}.1", command.get_name()));
        let text = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
        for option in shown.filter_map(|argument| argument.get_long()) {
            assert!(text.contains(&option.replace('-', "\\-")), "{}: --{option}: {text}", page.display());
        }
    }
    // What units name as their documentation is among them.
    for page in units()
        .iter()
        .flat_map(|(_, text)| text.lines().filter_map(|line| line.strip_prefix("Documentation=man:")))
    {
        assert!(folder.path().join(page.replace("(1)", ".1")).exists(), "{page}");
    }
}

#[test]
fn what_units_start_is_a_command() {
    let services = services();
    assert_eq!(services.len(), 3);
    for (path, text) in services {
        let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/")).expect("a command");
        let parsed = Cli::try_parse_from(line.replace("%i", "web1").split(' '));
        assert!(parsed.is_ok(), "{}: {line}: {:?}", path.display(), parsed.err());
    }
}

#[test]
fn systemd_takes_the_units() {
    if !has("systemd-analyze") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut instances = Vec::new();
    for (path, text) in units() {
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        // The program is not installed here.
        let text = text.replace("/usr/bin/vm-service", env!("CARGO_BIN_EXE_vm-service"));
        fs::write(folder.path().join(name), text).expect("written");
        instances.push(folder.path().join(name.replace('@', "@web1")));
    }
    let verify = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(instances).output();
    let verify = verify.expect("systemd-analyze");
    let said = String::from_utf8_lossy(&verify.stderr);
    // It may have something to say of the machine's own units.
    let ours: Vec<_> = said.lines().filter(|line| line.contains("vm-")).collect();
    assert!(verify.status.success() && ours.is_empty(), "{said}");
}

#[test]
fn shells_complete_commands_and_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let made = Command::new(env!("CARGO_BIN_EXE_vm-service")).args(["completions", shell]).output();
        let made = made.expect("vm-service");
        let script = String::from_utf8_lossy(&made.stdout);
        assert!(made.status.success() && script.contains("persist"), "{shell}: {script}");
    }
    if !has("bash") {
        return;
    }
    let check = |words: &str, expect: &str| {
        let script = "source <(\"$0\" completions bash); COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); \
                      function=$(complete -p vm-service | sed 's/.*-F \\([^ ]*\\).*/\\1/'); \
                      \"$function\" vm-service \"${COMP_WORDS[-1]}\" \"\"; echo \"${COMPREPLY[*]}\"";
        let bash =
            Command::new("bash").args(["-c", script, env!("CARGO_BIN_EXE_vm-service"), words]).output();
        let bash = bash.expect("bash");
        let (got, error) = (String::from_utf8_lossy(&bash.stdout), String::from_utf8_lossy(&bash.stderr));
        assert_eq!((got.trim_end(), error.as_ref()), (expect, ""), "{words}");
    };
    check("vm-service claim", "claim claims");
    check("vm-service claim --p", "--persist");
    check("vm-service run --vc", "--vcpus");
}
