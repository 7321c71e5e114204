"""Tests of the statements in docs/gangs.md and docs/ledger.md, by the start of each paragraph, point or row.

`tests/test_page_claims.py` fails if a statement of the pages is missing here, or if its tests do not exist. NO_CLAIM:
an introduction, a pointer, or the reader's own task, which is no promise of Atoll.
"""

from typing import Final

NO_CLAIM: Final = ""
TABLES: Final = "test_page_shows_the_tables"
ROWS: Final = "test_page_carries_every_row test_what_becomes_of_the_gpus_of_a_pod_that_left"

GANGS: Final = {
    "The pods of a gang start together": "test_of_two_gangs_that_fit_alone_one_runs_and_the_other_holds_nothing",
    "The annotation `gpu.scheduling/gang` of a pod": (
        "test_a_member_is_annotated_and_gated test_a_pod_belongs_to_one_gang test_ordinary_work_goes_on "
        "test_a_member_that_asks_for_no_gpu_keeps_its_gang_waiting_and_is_named "
        "test_a_launcher_without_gpus_starts_with_its_workers_and_holds_no_lease "
        "test_a_launcher_leaves_the_topology_only_if_nothing_keeps_it"
    ),
    "- **Pod set** of a pod": (
        "test_pod_sets_by_annotation_and_by_owners_labels test_a_pod_of_no_pod_set_stays_gated_and_is_counted"
    ),
    "- **Rank**": (
        "test_ranks_come_from_index_labels test_bad_indices_fall_back_to_names "
        "test_slices_follow_the_ranks_that_the_labels_say test_a_leaderworkerset_ranks_group_by_group_the_leader_first"
    ),
    "- Members of one pod set make": (
        "test_members_of_one_pod_set_that_ask_for_different_hosts_by_themselves_are_told"
    ),
    "- **No GpuGang?**": (
        "test_a_gang_is_made_for_pods_that_say_how_many_they_are test_pods_of_an_unknown_gang_are_told_what_is_missing "
        "test_pod_sets_are_those_that_the_members_name test_the_gang_ends_with_its_owners "
        "test_a_gang_of_a_job_set_outlives_its_jobs "
        "test_pods_are_told_that_some_of_them_are_missing test_pods_are_told_that_their_gang_cannot_be_made"
    ),
    "- **Pods of a Kubernetes `PodGroup`**": (
        "test_two_groups_that_fit_alone_but_not_together_run_one_after_the_other "
        "test_a_gang_is_made_for_a_group_and_follows_it test_only_groups_of_policy_gang_are_gangs"
    ),
    "- **All necessary members exist": (
        "test_owners_that_make_members_late_need_only_the_first "
        "test_extra_members_are_placed_as_soon_as_the_base_is_admitted"
    ),
    "- **StatefulSets** create a pod": "test_a_gang_of_a_stateful_set_says_that_its_pods_come_one_by_one",
    "A **group** is a leader": (
        "test_a_leader_lies_in_the_rack_of_its_workers_where_they_are_a_group test_a_leader_goes_where_its_workers_go "
        "test_fields_that_nobody_could_honour_are_refused test_a_group_stays_in_its_domain "
        "test_a_leader_without_a_topology_lies_by_that_of_its_workers"
    ),
    "`kueue.x-k8s.io/podset-required-topology`": (
        "test_each_pod_set_keeps_what_its_kueue_annotations_ask test_pod_sets_of_a_jobset_keep_their_own_topology "
        "test_what_is_assumed_of_templates_that_do_not_ask_is_an_event "
        "test_a_volume_in_another_rack_is_told_and_what_is_asked_stands_beside "
        "test_annotations_that_cannot_be_kept_make_no_gang_and_are_told "
        "test_annotations_that_a_gpugang_does_not_say_too_are_refused "
        "test_members_stay_where_kueues_topology_puts_each_of_them"
    ),
    "With the annotation `gpu.scheduling/rendezvous": (
        "test_a_member_that_asks_for_its_rendezvous_gets_the_variables "
        "test_members_that_ask_get_their_ranks_with_the_open_gates"
    ),
    "| `ATOLL_GANG_RANK`": "test_ranks_follow_the_pod_sets_and_the_members_ranks",
    "| `ATOLL_GANG_SIZE`": "test_who_does_not_ask_has_no_rank",
    "| `ATOLL_GANG_LEADER`": "test_ranks_follow_the_pod_sets_and_the_members_ranks",
    "| `ATOLL_GANG_HOSTS`": "test_a_list_of_addresses_that_is_too_long_is_left_out",
    "An address is `HOSTNAME": "test_an_address_has_the_subdomain_of_pods_that_have_one",
    "torchrun --nnodes": "test_members_meet_by_what_their_variables_say",
    "A rank stays with its member": "test_ranks_are_unique_and_stay",
    "[examples/gang.yaml]": "test_the_examples_work_as_shipped",
    "A `Topology` lists the levels": (
        "test_fabric_cliques_are_domains_by_both_ids test_the_named_topology_is_the_one_that_counts"
    ),
    "`spares: {level:": (
        "test_gangs_stay_in_one_clique_and_take_spare_trays_last "
        "test_a_lost_tray_is_replaced_by_a_spare_of_the_same_clique"
    ),
    "The same value under two parents": (
        "test_equal_rack_names_in_two_blocks_are_two_racks "
        "test_nodes_without_a_level_are_outside_for_those_who_demand_one test_a_level_that_no_node_has_is_an_obstacle "
        "test_a_misspelt_level_is_told_and_never_dropped"
    ),
    "Changing labels or levels": (
        "test_a_new_leader_and_a_new_topology_forget_nothing_that_runs "
        "test_running_members_of_a_gang_that_is_created_anew_with_a_mistake_run_on "
        "test_back_off_belongs_to_one_generation_of_one_gang"
    ),
    "1. **Quorum.**": (
        "test_a_gang_without_quorum_waits_and_holds_nothing test_members_behind_gates_of_others_do_not_make_a_quorum "
        "test_a_job_that_was_stopped_half_way_needs_only_the_rest test_each_pod_set_needs_its_own_members "
        "test_stages_of_members"
    ),
    "2. **One decision**": "test_a_gang_is_admitted_whole test_hosts_that_kube_scheduler_would_refuse_do_not_count",
    "3. **All Leases or none.**": "test_a_gpu_that_is_taken_meanwhile_undoes_the_whole_admission",
    "4. **The condition `Admitted`**": (
        "test_a_status_with_very_many_domains_is_summarised test_a_host_is_named_alone_where_it_is_the_lowest_level"
    ),
    "5. **Each member**": "test_a_gang_is_admitted_whole test_pinning_only_tightens",
    "**What is remembered.**": (
        "test_a_member_whose_object_is_collected_after_its_success_counts_on "
        "test_the_memory_is_bounded_and_no_success_of_a_large_gang_is_lost "
        "test_a_member_of_an_earlier_admission_says_nothing_about_this_one "
        "test_a_gang_that_is_taken_over_has_its_time_from_then_on"
    ),
    "Before the condition is written": (
        "test_a_leader_that_dies_at_any_write_leaves_nothing_half_done "
        "test_controllers_that_are_killed_during_an_admission_finish_or_undo_it "
        "test_a_pinned_member_that_is_refused_ends_the_admission "
        "test_the_time_that_a_member_was_gated_is_no_refusal"
    ),
    "`kubectl get gpugang` shows": (
        "test_a_gang_that_never_fits_says_so test_what_may_change_is_not_never "
        "test_a_node_that_is_added_starts_a_waiting_gang test_hopeless_gangs_are_tried_ever_more_rarely "
        "test_a_finished_gang_stays_as_it_is"
    ),
    "A running gang that lacks a member": (
        "test_a_gang_hears_why_what_it_lacks_finds_no_place "
        "test_a_gang_that_lacks_a_member_says_why_its_successor_waits "
        "test_a_gang_hears_that_its_own_members_leave_no_room "
        "test_deactivation_gives_everything_back_and_activation_starts_again"
    ),
    "**Order.**": (
        "test_order_is_priority_then_age_then_name test_strict_order_keeps_later_gangs_waiting "
        "test_a_gang_behind_the_head_takes_what_the_head_cannot_use test_a_head_that_can_use_nothing_blocks_nobody "
        "test_what_a_running_gang_lacks_comes_before_a_newcomer test_an_evicted_gang_goes_back_as_the_policy_says"
    ),
    "**Models and links.**": ("test_a_gang_gets_one_model test_a_gang_takes_sound_machines_where_they_lie_as_near"),
    "**Room.**": (
        "test_what_falls_free_is_kept_from_single_pods test_a_turn_ends "
        "test_annotation_of_the_controllers_keeps_gpus_by_itself"
    ),
    "- If its members have a higher priority": (
        "test_a_gang_below_goes_whole_for_one_above_it test_members_that_are_not_needed_go_first "
        "test_idle_gpus_are_combined_with_those_of_victims test_nobody_goes_for_a_gang_that_may_not_push "
        "test_victims_suffice_none_can_be_spared_and_the_worst_is_the_mildest "
        "test_units_stand_in_order_and_gangs_go_whole"
    ),
    "- Otherwise, or if that does not help": (
        "test_a_turn_ends test_nothing_is_kept_where_the_administrator_does_not_want_it"
    ),
    "- For preemption by single pods": (
        "test_a_gang_spares_what_it_does_not_need "
        "test_a_single_pod_that_wants_an_island_takes_no_gang_below_its_minimum "
        "test_members_of_gangs_are_the_last_victims "
        "test_a_gang_of_which_kube_scheduler_takes_a_needed_member_gives_way_whole"
    ),
    "- Nothing is kept or evicted": (
        "test_nothing_is_kept_for_a_gang_that_never_fits "
        "test_nobody_of_the_same_priority_goes_so_that_nothing_goes_round"
    ),
    "**Replacements.**": (
        "test_a_replacement_goes_where_its_gang_is_bound_to test_a_failed_member_is_replaced_in_its_rack "
        "test_a_replacement_that_cannot_start_is_given_up_alone test_pods_beyond_the_count_stay_outside "
        "test_nothing_flickers_between_a_members_success_and_its_successor"
    ),
    "Off by default.": "test_off_means_off test_wishes_beyond_the_bounds_are_told_and_not_cut",
    "| `--wait-for-pods-ready-enable`": "test_off_means_off",
    "| `--wait-for-pods-ready-timeout-seconds`": "test_the_clock_starts_when_the_last_member_was_let_go",
    "| `--wait-for-pods-ready-recovery-timeout-seconds`": (
        "test_recovery_has_its_own_time_and_only_after_the_gang_was_ready"
    ),
    "| `--wait-for-pods-ready-recovery-limit-count`": (
        "test_a_gang_that_is_lost_and_found_too_often_is_evicted_and_counted"
    ),
    "| `--wait-for-pods-ready-block-admission`": (
        "test_block_admission_lets_one_gang_start_at_a_time test_block_admission_needs_an_end"
    ),
    "| `--wait-for-pods-ready-requeuing-timestamp`": "test_an_evicted_gang_goes_back_as_the_policy_says",
    "| `--wait-for-pods-ready-requeuing-backoff-base-seconds`": "test_pauses_double_to_the_cap",
    "| `--wait-for-pods-ready-requeuing-backoff-limit-count`": (
        "test_pauses_double_and_the_gang_is_deactivated_when_the_limit_is_surpassed"
    ),
    "| `--wait-for-pods-ready-may-enable`": "test_wishes_beyond_the_bounds_are_told_and_not_cut",
    "Members count as ready": ("test_ready_and_succeeded_members_count_and_failed_ones_never test_stages_of_members"),
    "**blockAdmission costs throughput**": (
        "test_block_admission_lets_one_gang_start_at_a_time test_block_admission_needs_an_end "
        "test_a_gang_keeps_others_waiting_no_longer_than_the_administrator_says"
    ),
    "**Eviction.**": (
        "test_a_gang_that_is_not_ready_in_time_suspends_its_job_and_resumes_it "
        "test_a_job_that_is_not_ready_in_time_is_requeued_without_losing_tries "
        "test_an_owner_that_its_user_suspended_is_not_resumed "
        "test_an_evicted_gang_under_kueue_turns_the_switch_of_its_workload "
        "test_deactivation_gives_everything_back_and_counts_nothing "
        "test_a_gang_that_loses_members_beyond_its_limit_is_put_out_of_action "
        "test_a_gang_that_is_deactivated_and_activated_again_starts_with_a_clean_record"
    ),
    "The search first adds up": (
        "test_cpu_and_pod_room_count_for_all_members test_capacity_is_counted_in_islands_not_in_gpus "
        "test_hosts_that_kube_scheduler_would_refuse_do_not_count test_members_go_where_their_bound_volume_is "
        "test_members_with_volumes_of_their_own_go_each_to_its_own test_a_claim_that_is_bound_later_counts_from_then_on"
        " test_a_node_takes_as_many_members_as_it_takes_volumes test_a_new_volume_is_made_where_storage_has_room_for_it"
    ),
    "A plan is then rehearsed": (
        "test_members_keep_their_rules_among_themselves test_a_gang_that_cannot_keep_its_rules_waits_and_says_so "
        "test_a_plan_is_found_if_and_only_if_members_could_be_bound_one_by_one test_kube_scheduler_takes_every_plan"
    ),
    "A gang waits, with the reason in words": (
        "test_a_member_with_resource_claims_is_refused_in_words test_a_claim_that_no_node_can_serve_is_named "
        "test_a_claim_for_one_pod_that_another_pod_uses_is_named"
    ),
    "The search then takes the nearest domain": "test_no_placement_is_nearer_or_in_fewer_domains",
    "1. least room left over": "test_the_tightest_rack_is_taken_and_whole_ones_are_left",
    "2. hosts that the pods prefer": "test_disliked_hosts_come_last",
    "3. least free GPUs": "test_same_question_same_answer_in_whatever_order_hosts_come",
    "| `required` |": "test_pod_sets_that_ask_differently_keep_their_rules_and_that_of_the_whole",
    "| `preferred` |": "test_preferred_members_stay_together_and_fill_a_half_used_rack",
    "| `auto` |": "test_auto_takes_the_lowest_level_that_holds_everything",
    "| `unconstrained` |": "test_the_fewest_domains_are_found_whatever_lies_between",
    "| slices |": "test_a_gang_of_64_lies_in_one_block_and_each_slice_in_one_rack",
    "| leader and workers of one `group` |": (
        "test_a_leader_and_workers_share_the_domain_and_one_host_where_they_must"
    ),
    "| a request for the whole": (
        "test_a_leader_in_a_rack_workers_in_racks_and_everything_in_a_block "
        "test_pod_sets_that_ask_differently_keep_their_rules_and_that_of_the_whole"
    ),
    "| `balanced` |": "test_balanced_members_are_dealt_out_evenly",
    "| `minCount` below `count` |": "test_fewer_members_are_placed_where_that_is_enough test_as_many_as_fit_are_placed",
    "Three preferences give way": (
        "test_members_get_islands_where_that_costs_no_nearness test_spare_trays_come_last test_disliked_hosts_come_last"
    ),
    "GPUs of all members of a host": (
        "test_two_quads_of_a_cube_mesh_are_found_together test_neighbouring_ranks_share_racks"
    ),
    "**Lost hosts.**": (
        "test_nested_slices_are_repaired_innermost_first test_a_slice_that_was_lost_whole_moves_as_a_whole "
        "test_a_replacement_looks_where_the_others_are_now test_of_two_broken_groups_the_one_with_a_spare_is_repaired"
    ),
    "**Refusals** have counts": "test_a_gang_that_never_fits_says_so test_a_gang_below_its_quorum_gets_nothing",
    "**Limits.**": (
        "test_the_search_finds_places_exactly_when_there_are_some test_no_placement_is_nearer_or_in_fewer_domains "
        "test_several_pod_sets_are_all_placed_or_none "
        "test_never_more_domains_of_the_requested_level_than_in_kueues_order "
        "test_machines_of_sixteen_are_served_one_set_after_the_other test_the_costliest_gang_ends_at_the_limit "
        "test_what_changes_while_places_are_searched_is_seen"
    ),
    "`python -m bench.gang_search` measures": "test_a_thousand_members_in_slices_of_a_rack_take_few_steps",
    "`python -m bench.peer_cases domain FILE.jsonl` runs": (
        "test_found_alike_and_in_no_more_domains test_the_command_prints_a_line_per_scenario_and_a_summary"
    ),
    "| unconstrained pods use two hosts": "test_where_our_order_takes_other_hosts_than_kueues",
    "| below a slice, one host of four": "test_where_our_order_takes_other_hosts_than_kueues",
    "| of racks that fit equally": "test_where_our_order_takes_other_hosts_than_kueues",
    "- Under Kueue, a pod group": "test_a_gang_that_atoll_evicts_gives_its_quota_back_and_comes_back",
    "- Static volumes that several nodes reach": (
        "test_a_plan_that_is_let_through_finds_volumes_in_every_order "
        "test_a_plan_that_needs_more_volumes_on_a_node_is_told"
    ),
    "- kube-scheduler may evict a necessary member": (
        "test_a_gang_of_which_kube_scheduler_takes_a_needed_member_gives_way_whole "
        "test_a_gang_of_which_others_take_a_member_waits_for_its_successor"
    ),
    "- Missing members of a running gang": "test_what_a_running_gang_lacks_comes_before_a_newcomer",
    "- A new leader ends a gang's turn": "test_a_new_leader_takes_off_what_it_does_not_know",
    "- A running member does not move": "test_a_new_leader_and_a_new_topology_forget_nothing_that_runs",
}

LEDGER: Final = {
    "The ledger records who holds each GPU": NO_CLAIM,
    "free ──assume──► assumed": TABLES,
    "All transitions by state and event": TABLES,
    "| free | assumed |": TABLES,
    "| assumed | | reserved |": TABLES,
    "| reserved | | | bound |": TABLES,
    "| bound | | | | |": TABLES,
    "| releasing | | | bound |": TABLES,
    "| in doubt | | | bound |": TABLES,
    "*assume* and *forget* come from": (
        "test_verbs_are_idempotent test_assuming_what_another_has_is_refused_with_its_history "
        "test_late_rollback_frees_no_newer_assumption"
    ),
    "States are not stored but derived": (
        "test_free_devices_equal_those_of_an_oracle test_end_of_everything_leaves_nothing_behind"
    ),
    "A device is unknown until": TABLES,
    "| unknown | healthy |": TABLES,
    "| healthy | | quarantined |": TABLES,
    "| quarantined | healthy |": TABLES,
    "| cordoned | healthy |": TABLES,
    "The newest report decides": (
        "test_availability_forgets_the_past test_what_decides_first test_silence_is_measured_by_our_own_clock "
        "test_unreadable_is_unknown_and_a_cordon_comes_first"
    ),
    "Time alone frees nothing.": ROWS,
    "| kubelet ended the pod |": ROWS,
    "| deleted before it was bound |": ROWS,
    "| force-deleted, agent has not looked |": ROWS,
    "| force-deleted, containers still run |": ROWS,
    "| force-deleted, containers are gone |": ROWS,
    "| force-deleted, kubelet paused |": ROWS,
    "| force-deleted, report from before it |": ROWS,
    "| set Failed by somebody else |": ROWS,
    "| refused by kubelet after a reboot |": ROWS,
    "| node unreachable |": ROWS,
    "| node deleted, machine runs on |": ROWS,
    "| node deleted and made anew, containers gone |": ROWS,
    "| node replaced by another machine |": ROWS,
    "| machine rebooted after the deletion |": ROWS,
    "| machine rebooted before the deletion |": ROWS,
    "| card replaced in the same machine |": ROWS,
    "| card fell out of a node": ROWS,
    "| card taken out over a reboot": ROWS,
    "| card taken out, report from before": ROWS,
    "| one of two cards taken out |": ROWS,
    "| card taken out and put back |": ROWS,
    "| machine declared gone for good |": ROWS,
    "| machine declared gone, pod not deleted |": ROWS,
    "| only a Lease remembers the pod |": ROWS,
    "*Ended* relies on the pod's own status": (
        "test_door_is_shut_by_its_policy_alone test_end_of_a_pod_by_its_own_object"
    ),
    "A machine is recognised by": f"{ROWS} test_verdict",
    "If somebody deletes a Lease by hand": (
        "test_lease_lost_before_its_pod_went_is_kept_in_mind test_lease_that_ended_after_its_pod_was_released"
    ),
    "GPUs are offered to new pods by the report": (
        "test_report_of_the_past_offers_nothing test_missing_card_is_offered_to_nobody_and_keeps_its_lease "
        "test_replaced_card_is_not_sold_under_the_old_id test_a_gpu_that_falls_ill_under_its_pod_frees_nothing "
        "test_running_pods_always_fit"
    ),
    "| creating the Lease is the reservation": "test_binds_that_all_chose_before_any_has_reserved",
    "| a bound pod's annotation outranks": "test_evidence_outranks_in_order test_required_leases",
    "| a Lease deleted before its pod": "test_lease_lost_before_its_pod_went_is_kept_in_mind",
    "| a Lease that its bound holder": "test_standing",
    "| the fence: uid and resourceVersion": (
        "test_binding_is_fenced test_binding_in_doubt_keeps_the_leases_until_it_is_known"
    ),
    "| taking over: mark, move": (
        "test_expired_reservation_is_taken_back_behind_a_fence test_old_attempt_wakes_up_after_a_take_over"
    ),
    "| an attempt takes back only": "test_adopted_lease_outlives_the_attempt_that_created_it",
    "| proof of release |": "test_verdict test_no_history_frees_a_gpu_that_is_in_use",
    "| readiness belongs to a term": "test_each_change_of_leadership_begins_anew",
    "| a GPU of a GpuReservation goes": (
        "test_leases_of_a_reservation_are_taken_over_or_go_back test_lease_tells_which_reservation_it_goes_back_to "
        "test_no_gpu_twice_none_lost_and_all_back_in_the_end"
    ),
    "`make simulate HISTORIES=n SEED=s`": (
        "test_promises_are_kept_in_every_history test_seed_replays_exactly test_every_kind_of_step_occurs "
        "test_failing_history_shrinks_to_what_is_needed"
    ),
    "`tests/simulation/guards.py` proves": "test_simulation_bites",
}

PAGES: Final = {"docs/gangs.md": GANGS, "docs/ledger.md": LEDGER}
