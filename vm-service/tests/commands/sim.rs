//! `--sim`: commands on a simulated host that is kept in a directory.

use serde_json::Value;
use vm_passthrough::Host;

use super::{Answer, vm_service};

#[test]
fn a_simulated_host_is_made_kept_and_labelled() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("racks/lab");
    // Each as a command of its own: what one does, the next one finds.
    let run = |args: &str| {
        let got = vm_service(&Host::system(), &format!("{args} --sim {}", lab.display()));
        assert!(got.err.starts_with(&format!("simulated host: {}\n", lab.display())), "{args}: {got:?}");
        got
    };
    let json = |args: &str| -> Value {
        let Answer { exit, out, .. } = run(&format!("{args} --json"));
        let document: Value = serde_json::from_str(&out).expect("JSON");
        assert_eq!((exit, &document["simulated"]), (0, &Value::Bool(true)), "{args}: {out}");
        document
    };
    let driver = |address: &str| json(&format!("info {address}"))["function"]["driver"].clone();

    let list = json("list --all");
    let not_ready = |function: &&Value| function["ready"] == false && function["type"] != "bridge";
    let functions = list["functions"].as_array().expect("functions");
    let blocked: Vec<_> = functions.iter().filter(not_ready).map(|function| &function["address"]).collect();
    let expect =
        ["0000:00:1f.0", "0000:02:00.0", "0000:06:00.0", "0000:0a:00.0", "0000:0b:01.0", "0000:0b:02.0"];
    assert_eq!(blocked, expect, "boot display, root disk, uplink, no group, behind a bridge");
    let blocker = |address: &str| run(&format!("explain {address}")).out;
    for (address, code) in expect.iter().zip(["boot-display", "mounted-disk", "default-route", "no-iommu"]) {
        assert!(blocker(address).contains(code), "{address}: {}", blocker(address));
    }

    assert_eq!(run("claim 01:00.0 03:00.0").exit, 0);
    assert_eq!((driver("01:00.3"), driver("03:00.0")), ("vfio-pci".into(), "vfio-pci".into()));
    assert_eq!(json("claims")["claims"].as_array().map(Vec::len), Some(2));
    assert_eq!(run("claim 02:00.0").exit, 3);
    assert_eq!(json("vfs create 05:00.0 2")["physical"][0]["functions"].as_array().map(Vec::len), Some(2));
    assert_eq!(run("vfs remove 05:00.0").exit, 0);
    assert_eq!(run("release --all").exit, 0);
    assert_eq!((driver("01:00.3"), driver("03:00.0")), ("ucsi_ccg".into(), "nvme".into()));
}

#[test]
fn what_is_no_simulated_host_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    std::fs::create_dir(&lab).expect("a folder");
    let list = format!("list --sim {}", lab.display());
    assert_eq!(vm_service(&Host::system(), &list).exit, 0, "an empty one is as good as none");
    std::fs::write(lab.join("sim/version"), "9\n").expect("written");
    let got = vm_service(&Host::system(), &list);
    assert!(got.exit == 2 && got.err.contains("is no simulated host"), "{got:?}");
    assert_eq!(std::fs::read_to_string(lab.join("sim/version")).expect("kept"), "9\n");
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left beside it");
    for args in ["run guest.toml --sim lab", "list --sim lab --root lab"] {
        let got = vm_service(&Host::system(), args);
        assert!(got.exit == 2 && got.err.contains("--sim"), "{args}: {got:?}");
    }
}

/// Root may be pointed at a tree of another user, whose `run` is a link to the ledger of another host.
#[test]
fn a_simulated_host_whose_state_lies_elsewhere_or_that_another_user_owns_is_refused() {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    let folder = tempfile::tempdir().expect("a folder");
    let (real, evil) = (folder.path().join("real"), folder.path().join("evil"));
    let run = |args: &str, sim: &std::path::Path| {
        vm_service(&Host::system(), &format!("{args} --sim {}", sim.display()))
    };
    assert_eq!(run("claim 07:00.0", &real).exit, 0);
    assert_eq!(run("list", &evil).exit, 0);
    let refused = |what: &str| {
        for args in ["release --all", "claim 08:00.0", "list"] {
            let got = run(args, &evil);
            assert_eq!(got.exit, 2, "{args}: {got:?}");
            assert!(got.err.contains("cannot use the simulated host") && got.err.contains(what), "{got:?}");
        }
    };
    for name in ["run", "var", "sim", "sys"] {
        let (inside, aside) = (evil.join(name), folder.path().join("aside"));
        let was_there = inside.exists();
        if was_there {
            std::fs::rename(&inside, &aside).expect("renamed");
        }
        let target = if name == "sim" || name == "sys" { aside.clone() } else { real.join("run") };
        symlink(target, &inside).expect("a link");
        refused(&format!("evil/{name} is a symbolic link"));
        std::fs::remove_file(&inside).expect("removed");
        if was_there {
            std::fs::rename(&aside, &inside).expect("renamed");
        }
    }
    std::fs::set_permissions(&evil, PermissionsExt::from_mode(0o777)).expect("a mode");
    refused("can be written to by others");
    std::fs::set_permissions(&evil, PermissionsExt::from_mode(0o700)).expect("a mode");
    // Only root can give a directory to another user.
    if rustix::process::geteuid().is_root() {
        for path in [evil.clone(), evil.join("run")] {
            chown(&path, Some(65534), None).expect("an owner");
            refused("belongs to user 65534 and not to 0");
            chown(&path, Some(0), None).expect("an owner");
        }
    }
    assert_eq!(run("list", &evil).exit, 0);
    let claims = run("claims --json", &real).out;
    let claims: Value = serde_json::from_str(&claims).expect("JSON");
    assert_eq!(claims["claims"].as_array().map(Vec::len), Some(1), "{claims}");
}
