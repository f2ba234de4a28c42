use super::*;

fn read(pairs: &[(&str, &str)]) -> Result<Option<Place>> {
    Place::read(&|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
}

fn refused(pairs: &[(&str, &str)], words: &[&str]) {
    let e = read(pairs).expect_err("refused");
    assert_eq!(e.code(), Code::Usage);
    for word in words {
        assert!(e.to_string().contains(word), "{word} is not in: {e}");
    }
}

const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "4000")];

#[test]
fn one_process_alone_is_none() {
    assert_eq!(read(&[]), Ok(None));
    assert_eq!(read(&MASTER), Ok(None));
    assert_eq!(read(&[("RANK", ""), ("WORLD_SIZE", " ")]), Ok(None));
    assert_eq!(read(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]), Ok(None));
    // The script of a job, and a shell within an allocation.
    assert_eq!(read(&[("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")]), Ok(None));
}

#[test]
fn torchrun_is_understood() {
    let torchrun = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("TORCHELASTIC_RUN_ID", "none"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RESTART_COUNT", "2"),
        // torchrun was started by srun.
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_LOCALID", "0"),
    ];
    let place = read(&[&torchrun[..], &MASTER].concat()).expect("understood").expect("ranks");
    assert_eq!((place.rank, place.size, place.local, place.local_size), (5, 8, 1, 4));
    assert_eq!(place.restarts, 2);
    let meet = Meet { host: "10.0.0.1".into(), port: 4000, served: true, prefix: "q4-train/2".into() };
    assert_eq!((place.meet, place.by), (meet, Starter::Torchrun));
    let plain = [("RANK", "1"), ("WORLD_SIZE", "2")];
    let place = read(&[&plain[..], &MASTER].concat()).expect("understood").expect("ranks");
    assert_eq!((place.local, place.local_size, place.meet.served), (1, 2, false));
}

#[test]
fn mpirun_and_slurm_are_understood() {
    let mpirun = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "2718105601"),
    ];
    let place = read(&mpirun).expect("understood").expect("ranks");
    assert_eq!((place.by, place.meet.host.as_str()), (Starter::Mpirun, "127.0.0.1"));
    let mut other = mpirun;
    other[4].1 = "2718105602";
    assert_ne!(read(&other).expect("understood").expect("ranks").meet.port, place.meet.port);
    let slurm = [
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
        ("SLURM_STEP_NODELIST", "gpu[03-04,11]"),
        ("SLURM_JOB_ID", "12"),
    ];
    let place = read(&slurm).expect("understood").expect("ranks");
    assert_eq!((place.by, place.meet.host.as_str(), place.local_size), (Starter::Slurm, "gpu03", 2));
    // mpirun inside of an allocation: every daemon is a task.
    let place = read(&[&mpirun[..], &slurm].concat()).expect("understood").expect("ranks");
    assert_eq!((place.by, place.size), (Starter::Mpirun, 2));
    for (list, first) in [("a1", "a1"), ("a1,b2", "a1"), ("n[7,9]-x,m", "n7-x")] {
        assert_eq!(first_node(list).as_deref(), Some(first));
    }
}

#[test]
fn partial_and_contradictory_variables_are_named() {
    refused(&[("RANK", "0")], &["WORLD_SIZE", "missing", "RANK alone"]);
    refused(&[("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")], &["RANK is missing"]);
    refused(&[("LOCAL_RANK", "0")], &["RANK, WORLD_SIZE is missing"]);
    refused(&[("RANK", "0"), ("WORLD_SIZE", "2")], &["MASTER_ADDR is missing"]);
    refused(&[("RANK", "0"), ("WORLD_SIZE", "2"), MASTER[0]], &["MASTER_PORT is missing"]);
    let with = |more: &[(&'static str, &'static str)]| [more, &MASTER].concat();
    refused(&with(&[("RANK", "2"), ("WORLD_SIZE", "2")]), &["RANK=2", "WORLD_SIZE=2"]);
    refused(&with(&[("RANK", "one"), ("WORLD_SIZE", "2")]), &["RANK=one"]);
    refused(&with(&[("RANK", "0"), ("WORLD_SIZE", "0")]), &["WORLD_SIZE=0"]);
    let local = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")];
    refused(&with(&local), &["LOCAL_RANK=2"]);
    refused(&[("RANK", "0"), ("WORLD_SIZE", "2"), MASTER[0], ("MASTER_PORT", "0")], &["MASTER_PORT=0"]);
    let both = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ];
    refused(&with(&both), &["RANK=0", "OMPI_COMM_WORLD_RANK=1"]);
    refused(&[("OMPI_COMM_WORLD_SIZE", "2")], &["OMPI_COMM_WORLD_RANK"]);
    let apart = [
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    refused(&apart, &["MASTER_ADDR", "mpirun -x"]);
}
