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
    let folder = installable();
    let name = |path: PathBuf| {
        path.file_name().and_then(|name| name.to_str()).expect("a name").replace('@', "@web1")
    };
    let instances: Vec<_> = units().into_iter().map(|(path, _)| folder.path().join(name(path))).collect();
    let verify = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(instances).output();
    let verify = verify.expect("systemd-analyze");
    let said = String::from_utf8_lossy(&verify.stderr);
    // It may have something to say of the machine's own units.
    let ours: Vec<_> = said.lines().filter(|line| line.contains("vm-")).collect();
    assert!(verify.status.success() && ours.is_empty(), "{said}");
}

/// The exposure that `systemd-analyze security` reports of each unit, in tenths, with systemd 252: it weighs directives differently in
/// other releases. Each unit names what keeps it above 0.
const EXPOSURES: &[(&str, u32)] =
    &[("vm-claims.service", 23), ("vm-guest@.service", 31), ("vm-service.service", 33)];
/// How much other releases may differ.
const TOLERANCE: u32 = 3;

/// The units with a program that is there, in a folder of their own.
fn installable() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (path, text) in units() {
        let text = text.replace("/usr/bin/vm-service", env!("CARGO_BIN_EXE_vm-service"));
        fs::write(folder.path().join(path.file_name().expect("a name")), text).expect("written");
    }
    folder
}

#[test]
fn units_are_hardened_and_name_what_they_omit() {
    if !has("systemd-analyze") {
        return;
    }
    let folder = installable();
    for (path, text) in services() {
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        let known = EXPOSURES.iter().find(|(unit, _)| *unit == name);
        let (_, exposure) = known.unwrap_or_else(|| panic!("{name} has no exposure"));
        let mut analyze = Command::new("systemd-analyze");
        analyze.args(["security", "--offline=true", "--json=short"]);
        analyze.arg(format!("--threshold={}", exposure + TOLERANCE)).current_dir(&folder);
        // systemd-analyze takes an instance of a template.
        let analyzed =
            analyze.arg(format!("./{}", name.replace('@', "@web1"))).output().expect("systemd-analyze");
        let stderr = String::from_utf8_lossy(&analyzed.stderr);
        if stderr.contains("unrecognized option") {
            println!("skipped: this systemd-analyze can't judge files: {stderr}");
            return;
        }
        let stdout = String::from_utf8_lossy(&analyzed.stdout);
        assert!(analyzed.status.success(), "{name}: more exposed than {exposure} tenths: {stdout}{stderr}");
        let checks: serde_json::Value =
            serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"));
        let comments: String = text.lines().filter(|line| line.starts_with('#')).collect();
        let failed = checks.as_array().expect("checks").iter().filter(|check| check["set"] == false);
        for check in failed.filter_map(|check| check["name"].as_str()) {
            let explained = match check.split_once("=~") {
                // The rights that it keeps, each of which a comment explains.
                Some(("CapabilityBoundingSet", _)) => {
                    let line = text.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
                    let kept = line.unwrap_or_else(|| panic!("{name} keeps all capabilities"));
                    kept.split(' ').all(|right| comments.contains(right.trim_start_matches("CAP_")))
                }
                Some(("RestrictAddressFamilies", _)) => comments.contains("AF_UNIX:"),
                Some((directive, _)) => comments.contains(&format!("{directive}=")),
                None => check.split('/').all(|directive| comments.contains(directive)),
            };
            assert!(explained, "{name} neither sets {check} nor gives a reason");
        }
    }
}

/// The system calls of a group of systemd's, and those of the groups in it.
fn calls_of(group: &str, calls: &mut Vec<String>) -> Option<()> {
    let listed = Command::new("systemd-analyze").args(["syscall-filter", group]).output().ok()?;
    listed.status.success().then_some(())?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    for call in text.lines().skip(1).map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        match call.starts_with('@') {
            true => calls_of(call, calls)?,
            false => calls.push(call.to_owned()),
        }
    }
    Some(())
}

/// Workers and VMMs inherit the filter of the units, so it must allow every system call of their own filters.
#[test]
fn units_allow_the_system_calls_of_guests() {
    if !has("systemd-analyze") {
        return;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/os/sandbox/calls.rs");
    let source = fs::read_to_string(source).expect("the lists");
    let needed: Vec<&str> = source
        .split("libc::SYS_")
        .skip(1)
        .filter_map(|rest| rest.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').next())
        .collect();
    assert!(needed.len() > 50 && needed.contains(&"ioctl"), "{needed:?}");
    for unit in ["vm-guest@.service", "vm-service.service"] {
        let (_, text) = services().into_iter().find(|(path, _)| path.ends_with(unit)).expect("a unit");
        let filter = text.lines().find_map(|line| line.strip_prefix("SystemCallFilter=")).expect("a filter");
        let mut allowed = Vec::new();
        for name in filter.split(' ') {
            match name.starts_with('@') {
                true => calls_of(name, &mut allowed).expect("a group"),
                false => allowed.push(name.to_owned()),
            }
        }
        // These install the filters and Landlock's rules.
        let own = ["landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "seccomp"];
        let missing: Vec<_> =
            needed.iter().chain(&own).filter(|call| !allowed.iter().any(|it| it == *call)).collect();
        assert!(missing.is_empty(), "{unit} refuses {missing:?}");
    }
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
