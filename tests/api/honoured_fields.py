"""A test of the effect of every field that a user may write, and of every annotation or label that Atoll reads.

Each test goes from the object to its effect. `tests/api/test_honoured_fields.py` keeps the list complete: every request
is honoured or refused.
"""

CLAIM = "tests/extender/test_claim_fields.py"
GANG = "tests/controllers/test_gang_requests.py"
GANGS = "tests/controllers/test_gangs.py"
RULES = "tests/cluster/gangs/test_rules.py"
REFUSED = "tests/api/test_gang_fields.py::test_fields_that_nobody_could_honour_are_refused"
MACHINES = f"{CLAIM}::test_a_field_of_a_claim_decides_which_machines_serve"
DIFFERENTLY = f"{GANG}::test_pod_sets_that_ask_differently_keep_their_rules_and_that_of_the_whole"
WHOLE = f"{GANG}::test_a_topology_of_the_whole_gang_holds_for_one_pod_set_too"
RANKS = f"{GANG}::test_slices_follow_the_ranks_that_the_labels_say"
ENOUGH = f"{GANG}::test_as_many_members_start_as_are_enough_and_fit"
TIMES = f"{RULES}::test_a_gangs_own_times_decide_when_it_is_evicted"
PAUSES = f"{RULES}::test_a_gangs_own_pauses_decide_when_it_is_tried_again"
MADE = "tests/controllers/test_gang_making.py::test_each_pod_set_keeps_what_its_kueue_annotations_ask"
MIG = f"{CLAIM}::test_a_mig_profile_of_a_claim_takes_instances_of_it"
NOT_READY = f"{GANGS}::test_a_gang_that_is_not_ready_in_time_suspends_its_job_and_resumes_it"
CORDON = "tests/e2e/test_cordon.py::test_a_cordoned_gpu_goes_to_no_new_pod_until_it_is_given_back"
RELEASE = "tests/e2e/test_cordon.py::test_a_quarantined_gpu_is_given_out_again_when_it_is_released"
SPARES = f"{GANGS}::test_gangs_stay_in_one_clique_and_take_spare_trays_last"
WORKERS = "tests/ml/test_capabilities.py::test_worker_advertises_what_its_node_and_report_tell"
WORD = "tests/controllers/test_machines.py::test_a_word_frees_what_left_and_forgets_the_rest"
STORY = "tests/explain/test_overview.py::test_story_tells_holders_health_and_what_was_said"
LEDGER = "tests/cluster/test_ledger.py"

SHAPE = "tests/cluster/test_reservations.py::test_shape_is_taken"
USERS = "tests/cluster/test_reservations.py::test_who_may_use_it_and_why_not"
FIELDS = {
    "GpuClaim": {
        "devices.count": MACHINES,
        "devices.policy": f"{CLAIM}::test_the_policy_of_a_claim_decides_how_its_gpus_lie",
        "devices.models": f"{CLAIM}::test_models_are_taken_in_the_order_of_the_claim",
        "devices.mixedModels": f"{CLAIM}::test_mixed_models_of_a_claim_lets_one_pod_have_several",
        "devices.memory": MACHINES,
        "devices.computeCapability": MACHINES,
        "devices.interconnect": MACHINES,
        "devices.minBandwidthGBps": MACHINES,
        "devices.migProfile": MIG,
        "devices.vendor": f"{CLAIM}::test_the_vendor_of_a_claim_takes_cards_of_that_vendor",
        "visibleDevices": "tests/extender/test_bind_plan.py::test_modes_on_a_machine_whose_indices_are_not_its_ids",
        "gangRef": "tests/webhook/test_gangs.py::test_a_member_is_annotated_and_gated",
    },
    "GpuGang": {
        "active": f"{GANGS}::test_deactivation_gives_everything_back_and_activation_starts_again",
        "minMember": ENOUGH,
        "topologyName": f"{GANG}::test_the_named_topology_is_the_one_that_counts",
        "topology.mode": DIFFERENTLY,
        "topology.level": DIFFERENTLY,
        "topology.slices.size": WHOLE,
        "topology.slices.level": WHOLE,
        "topology.balanced": f"{GANG}::test_balanced_members_are_dealt_out_evenly",
        "topology.podIndexLabel": REFUSED,
        "topology.subGroupIndexLabel": REFUSED,
        "topology.subGroupCount": REFUSED,
        "podSets.name": DIFFERENTLY,
        "podSets.count": "tests/cluster/gangs/test_lifecycle.py::test_pods_beyond_the_count_stay_outside",
        "podSets.minCount": ENOUGH,
        "podSets.group": f"{GANG}::test_a_leader_lies_in_the_rack_of_its_workers_where_they_are_a_group",
        "podSets.topology.mode": DIFFERENTLY,
        "podSets.topology.level": DIFFERENTLY,
        "podSets.topology.slices.size": RANKS,
        "podSets.topology.slices.level": RANKS,
        "podSets.topology.balanced": f"{GANG}::test_balanced_members_are_dealt_out_evenly",
        "podSets.topology.podIndexLabel": RANKS,
        "podSets.topology.subGroupIndexLabel": RANKS,
        "podSets.topology.subGroupCount": RANKS,
        "waitForPodsReady.enable": NOT_READY,
        "waitForPodsReady.timeout": NOT_READY,
        "waitForPodsReady.recoveryTimeout": TIMES,
        "waitForPodsReady.recoveryLimitCount": (
            f"{GANG}::test_a_gang_that_loses_members_beyond_its_limit_is_put_out_of_action"
        ),
        "waitForPodsReady.requeuingStrategy.timestamp": (f"{RULES}::test_an_evicted_gang_goes_back_as_the_policy_says"),
        "waitForPodsReady.requeuingStrategy.backoffBaseSeconds": PAUSES,
        "waitForPodsReady.requeuingStrategy.backoffMaxSeconds": PAUSES,
        "waitForPodsReady.requeuingStrategy.backoffLimitCount": PAUSES,
    },
    "Topology": {
        "nodeSelector": f"{GANG}::test_the_named_topology_is_the_one_that_counts",
        "levels.nodeLabel": DIFFERENTLY,
        "spares.level": SPARES,
        "spares.count": SPARES,
    },
    "GpuNodeStatus": {
        "cordons.uuid": CORDON,
        "cordons.reason": CORDON,
        "cordons.by": STORY,
        "releases.uuid": RELEASE,
        "releases.time": "tests/cluster/test_health.py::test_an_administrators_word_ends_what_was_until_then",
        "gone.nodeUid": WORD,
        "gone.reason": WORD,
        "gone.by": WORD,
        "gone.time": WORD,
        "gone.sequence": "tests/cluster/test_machine_life.py::test_when_a_word_counts",
        "gone.forget": WORD,
        "releases.reason": STORY,
        "releases.by": STORY,
    },
    "GpuReservation": {
        "shape.count": SHAPE,
        "shape.models": SHAPE,
        "shape.migProfile": "tests/cluster/test_reservations.py::test_instances_of_a_profile_are_taken_like_gpus",
        "shape.unit": SHAPE,
        "shape.level": "tests/cluster/test_reservations.py::test_all_of_it_lies_in_one_domain",
        "namespaces": USERS,
        "serviceAccounts": USERS,
        "starts": "tests/cluster/test_reservations.py::test_time_decides_whether_it_holds_anything",
        "ends": "tests/cluster/test_reservations.py::test_time_decides_whether_it_holds_anything",
        "unusedTimeoutSeconds": "tests/cluster/test_reservations.py::test_what_nobody_uses_is_given_back_for_good",
    },
}
"""Below `spec`, lists without their brackets; objects that only hold others are left out."""

KEYS = {
    "CLAIM": "tests/webhook/test_mutation.py::test_a_claimed_pod_gets_count_scheduler_uid_and_variables",
    "GANG": "tests/webhook/test_gangs.py::test_a_member_is_annotated_and_gated",
    "RESERVATION": "tests/cluster/test_reservations.py::test_pod_that_names_one_never_runs_outside_it",
    "GANG_SIZE": f"{GANGS}::test_a_gang_is_made_for_pods_that_say_how_many_they_are",
    "POD_SET": DIFFERENTLY,
    "RENDEZVOUS": "tests/webhook/test_gangs.py::test_a_member_that_asks_for_its_rendezvous_gets_the_variables",
    "RANK": "tests/cluster/gangs/test_rendezvous.py::test_ranks_follow_the_pod_sets_and_the_members_ranks",
    "WORLD_SIZE": "tests/cluster/gangs/test_rendezvous.py::test_ranks_follow_the_pod_sets_and_the_members_ranks",
    "LEADER": "tests/cluster/gangs/test_rendezvous.py::test_an_address_has_the_subdomain_of_pods_that_have_one",
    "HOSTS": "tests/cluster/gangs/test_rendezvous.py::test_a_list_of_addresses_that_is_too_long_is_left_out",
    "PREEMPTIBLE": "tests/cluster/gangs/test_gang_preemption.py::"
    "test_whoever_may_not_be_preempted_is_no_victim_and_waited_for",
    "CLAIM_UID": "tests/e2e/test_refusals.py::test_a_claim_that_goes_away_takes_its_waiting_pods_hope",
    "ALLOCATED": f"{LEDGER}::test_each_kind_of_news_takes_the_device",
    "UUIDS": f"{LEDGER}::test_replaced_card_is_not_sold_under_the_old_id",
    "WOKEN": "tests/controllers/test_reconcilers.py::test_nomination_that_led_to_no_bind_is_withdrawn",
    "KEPT": "tests/extender/test_victims.py::test_annotation_of_the_controllers_keeps_gpus_by_itself",
    "ADMISSION": "tests/cluster/gangs/test_identity.py::"
    "test_a_member_of_an_earlier_admission_says_nothing_about_this_one",
    "PREEMPTION_NOTICE": "tests/controllers/test_preemption.py::test_notice_that_nothing_followed_is_withdrawn",
    "CONTAINER_DEVICES_PREFIX": "tests/extender/test_bind_plan.py::test_every_container_sees_the_whole_set",
    "CONTAINER_UUIDS_PREFIX": "tests/extender/test_bind_plan.py::test_containers_that_asked_for_their_own_see_parts",
    "MODELS_LOADED": WORKERS,
    "MODELS_CACHED": "tests/ml/test_capabilities.py::test_pods_tell_of_models_and_only_nodes_of_runtimes",
    "RUNTIMES": "tests/ml/test_capabilities.py::test_pods_tell_of_models_and_only_nodes_of_runtimes",
    "MIRROR": f"{LEDGER}::test_mirror_pods_are_not_believed",
    "STATIC_POD_UID": "tests/agent/test_evidence.py::test_a_static_pod_is_known_under_the_uid_that_the_kubelet_uses",
    "GANG_MADE_FOR": f"{GANGS}::test_a_gang_is_made_for_pods_that_say_how_many_they_are",
    "GANG_SUSPENDED": NOT_READY,
    "GANG_FENCED": "tests/controllers/test_gang_fences.py::test_a_status_without_an_answer_is_fenced_first",
    "LEASE_NODE": f"{LEDGER}::test_unreadable_lease_blocks_the_device_of_its_name",
    "LEASE_NODE_UID": f"{LEDGER}::test_unreadable_lease_blocks_the_device_of_its_name",
    "LEASE_DEVICE_ID": f"{LEDGER}::test_unreadable_lease_blocks_the_device_of_its_name",
    "LEASE_DEVICE_UUID": f"{LEDGER}::test_replaced_card_is_not_sold_under_the_old_id",
    "LEASE_KIND_LABEL": f"{LEDGER}::test_unreadable_lease_blocks_the_device_of_its_name",
    "LEASE_CLAIM": "tests/extender/test_binder_e2e.py::test_bind_gives_a_linked_pair_and_says_so_everywhere",
    "LEASE_GANG": "tests/controllers/test_gang_adversities.py::"
    "test_a_gang_that_is_created_anew_in_the_middle_is_admitted_anew",
    "LEASE_ATTEMPT": "tests/extender/test_binder_e2e.py::test_adopted_lease_outlives_the_attempt_that_created_it",
    "LEASE_DEADLINE": "tests/controllers/test_reconcilers.py::test_reservation_that_is_not_over_is_left_alone",
    "LEASE_FENCED": "tests/extender/test_binder_e2e.py::test_fenced_lease_is_not_relied_on",
    "LEASE_IN_DOUBT": "tests/e2e/test_release.py::test_a_paused_kubelet_keeps_the_gpus_in_doubt",
    "DRIVER_HOLD": "tests/agent/test_node_agent.py::test_a_labelled_node_has_its_driver_let_go_and_taken_up",
    "COMPLETE_JOBS": "tests/webhook/test_configuration.py::test_jobs_are_sent_only_where_a_namespace_asks_for_it",
    "EVIDENCE_WANTED": "tests/agent/test_node_agent.py::test_a_request_made_before_the_start_is_answered",
}
"""Annotations and labels of Atoll's own, by their names in `atoll.api.names`."""

OWNERS = "tests/cluster/gangs/test_owners_pods.py"
JOBSET = f"{OWNERS}::test_a_jobset_gives_leader_and_workers_their_sets_and_its_jobs_their_turns"
LWS = f"{OWNERS}::test_a_leaderworkerset_ranks_group_by_group_the_leader_first"
FOREIGN_KEYS = {
    "kueue.x-k8s.io/podset-required-topology": MADE,
    "kueue.x-k8s.io/podset-preferred-topology": MADE,
    "kueue.x-k8s.io/podset-unconstrained-topology": MADE,
    "kueue.x-k8s.io/podset-slice-required-topology": MADE,
    "kueue.x-k8s.io/podset-slice-size": MADE,
    "kueue.x-k8s.io/podset-group-name": MADE,
    "batch.kubernetes.io/job-completion-index": RANKS,
    "kubernetes.io/job-completion-index": f"{RULES}::test_ranks_come_from_index_labels",
    "training.kubeflow.org/replica-index": f"{OWNERS}::test_a_pytorchjob_has_master_and_workers",
    "leaderworkerset.sigs.k8s.io/worker-index": LWS,
    "apps.kubernetes.io/pod-index": f"{RULES}::test_ranks_come_from_index_labels",
    "jobset.sigs.k8s.io/job-index": JOBSET,
    "leaderworkerset.sigs.k8s.io/group-index": LWS,
    "leaderworkerset.sigs.k8s.io/size": LWS,
    "jobset.sigs.k8s.io/replicatedjob-replicas": JOBSET,
    "jobset.sigs.k8s.io/replicatedjob-name": JOBSET,
    "training.kubeflow.org/replica-type": f"{OWNERS}::test_a_pytorchjob_has_master_and_workers",
    "ray.io/group": f"{OWNERS}::test_a_raycluster_has_its_head_and_its_groups",
    "ray.io/worker-group-replica-index": f"{OWNERS}::test_a_raycluster_has_its_head_and_its_groups",
    "training.kubeflow.org/job-role": f"{OWNERS}::test_an_mpijob_has_launcher_and_workers_by_role",
}
"""Of others, on members of gangs: what ranks them, what says their pod set, and where that may lie."""
